"""The job script of one run, or of an array of runs: plan and text."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, TemplateSyntaxError

from megatron_scalerl.cluster.allocation import Allocation, Request
from megatron_scalerl.cluster.site import Site
from megatron_scalerl.record import record

TEMPLATES = Path(__file__).parent / "templates"
MARGIN_S = 60
"""Seconds by which Slurm may be early or, on a busy node, late with the signal before the time limit."""
EXPORTED = (
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME", "HF_HOME",
    "OMP_NUM_THREADS", "MSRL_LOG_LEVEL", "MODULEPATH", "SLURM_CONF", "TMPDIR", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
"""Variables of the submitting shell that the job gets; all further variables, which may hold secrets, stay in the
shell."""


@record
class JobPlan:
    """The content of a job script. Produced by `submission`."""

    name: str
    script: Path
    """Path of the script; the job's outputs go to the same folder."""
    runs: tuple[Path, ...]
    """Absolute folders of the runs. Several runs are the tasks of an array."""
    cwd: Path
    """Folder of the submission, to which the paths in the recipes are relative."""
    request: Request
    nodes: Allocation
    lead_s: int
    """Seconds before the time limit at which the run is asked to save and exit."""
    startup_s: int
    """Seconds from start to first step. A budget that pays for fewer seconds counts as spent."""
    site: Site

    @property
    def outputs(self) -> str:
        """Name of the job's output files, in Slurm's notation."""
        folder = str(self.script.parent).replace("%", "%%")
        if self.request.throttle:
            return f"{folder}/%A_%a.out"
        return f"{folder}/%j.out"


def render(plan: JobPlan) -> str:
    """The text of the job script.

    Raises ValueError for a value that would break a line of the script, and for a path that sbatch would change.
    """
    request = plan.request
    train = ["train", "--supervise", "--max-failures", str(request.max_failures)]
    check = ["doctor", "--hosts", "slurm", "--gpus", str(plan.nodes.gpus), "--within", f"{request.check_seconds:g}"]
    budget = ["submit", "--gpu-hours", f"{request.gpu_hours or 0:g}", "--seconds-left"]
    if plan.nodes.nodes > 1:
        train += ["--hosts", "slurm", "--slots", str(plan.nodes.slots)]
    options = _options(plan)
    for text in map(str, [*options, plan.script, *plan.runs, plan.cwd]):
        if not text.isprintable():
            raise ValueError(f"submit: remove line breaks and control characters from this text: {text!r}")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # the template is a shell script, not HTML: every value passes through `quote`
        autoescape=False,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    template = Path(plan.site.template or TEMPLATES / "job.sbatch")
    # srun does not read the job's --cpus-per-task, so the script exports the number; a site that counts CPUs per GPU
    # has no such number
    cpus = None if "cpus-per-gpu" in plan.site.sbatch else plan.nodes.cpus
    try:
        return environment.from_string(template.read_text(encoding="utf8")).render(
            modules=plan.site.modules,
            environment=plan.site.environment,
            options=options,
            script=plan.script,
            runs=plan.runs,
            cwd=plan.cwd,
            nodes=plan.nodes.nodes,
            chain=request.chain,
            max_requeues=request.max_requeues,
            cpus=cpus,
            gpu_hours=request.gpu_hours,
            startup_s=plan.startup_s,
            save_s=plan.lead_s - MARGIN_S,
            container=_container(plan),
            local=plan.site.local,
            pyxis=plan.site.container == "pyxis",
            command=_command(plan, train),
            preflight=_command(plan, check),
            budget=_command(plan, budget),
        )
    except TemplateSyntaxError as error:
        raise ValueError(f"{template}, line {error.lineno}: {error}") from None
    except TemplateError as error:
        raise ValueError(f"{template}: {error}") from None


def _options(plan: JobPlan) -> list[str]:
    """The options of the #SBATCH lines, one for each line. Raises ValueError for a site's options that request too
    few GPUs or hold quotes."""
    request = plan.request
    nodes = plan.nodes
    options: dict[str, str | bool] = {
        "job-name": plan.name,
        "partition": request.partition,
        "time": request.time,
        "nodes": str(nodes.nodes),
        "ntasks-per-node": "1",
        "no-kill": nodes.nodes > 1,  # the job goes on where a node other than the first fails
    }
    if nodes.gpus:
        options["gpus-per-node"] = str(nodes.gpus)
    if nodes.cpus is None:
        options |= {"exclusive": True, "mem": "0"}  # "0" requests all memory of the node
    else:
        options["cpus-per-task"] = str(nodes.cpus)
    options |= {
        "no-requeue" if request.chain else "requeue": True,
        # B sends the signal to the batch shell alone, which forwards the signal to the controller
        "signal": f"B:USR1@{plan.lead_s}",
        # a job that is queued again has the same id, and so the same output file
        "open-mode": "append",
        "output": plan.outputs,
        # the job gets no other variables, since the submitting shell may hold secrets
        "export": ",".join(EXPORTED),
    }
    if request.throttle:
        options["array"] = f"0-{len(plan.runs) - 1}%{request.throttle}"
    return plan.site.options(options, gpus=nodes.gpus)


def _command(plan: JobPlan, words: Sequence[str]) -> str:
    """Shell text that starts the program with the arguments `words`, in the site's container if there is one. The
    script's template adds a path at the end."""
    has_container = plan.site.container != "none"
    program: Sequence[str] = (sys.executable, "-m", "megatron_scalerl")
    if has_container:
        program = ("megatron-scalerl",)
    command = " ".join(_quoted(word) for word in (*(plan.site.program or program), *words))
    if has_container:
        return f'"${{inside[@]}}" {command}'
    return command


def _container(plan: JobPlan) -> str:
    """The words that start the container in the script: options of srun for pyxis, else the command that starts the
    program inside.

    Empty for container "none".
    """
    site = plan.site
    folders = [f"{plan.cwd}:{plan.cwd}", *site.mounts, "{run}:{run}", "{local}:{local}"]
    if site.container == "none":
        return ""
    if site.container == "pyxis":
        words = [
            f"--container-image={site.image}",
            "--no-container-mount-home",
            f"--container-workdir={plan.cwd}",
        ]
        words.append(f"--container-mounts={','.join(folders)}")
    elif site.container == "apptainer":
        words = ["apptainer", "exec"]
        if plan.nodes.gpus:
            words.append("--nv")
        bind_words = [word for folder in folders for word in ("--bind", folder)]
        words += ["--pwd", str(plan.cwd), *bind_words, str(site.image)]
    else:
        words = [word.replace("{cwd}", str(plan.cwd)) for word in site.container]
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    """A quoted word of the script, with {run} and {local} replaced by the script's variables for the folders."""
    quoted = shlex.quote(word)
    # bash expands no variable inside single quotes, so the quotes end before the variable and begin again after it
    for name, variable in (("run", "run"), ("local", "MSRL_LOCAL%/*")):
        quoted = quoted.replace(f"{{{name}}}", f"'\"${{{variable}}}\"'")
    return quoted

"""The job script of one run, or of an array of runs: what is in it, and its text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_scalerl.cluster.allocation import Allocation, Request
from megatron_scalerl.cluster.site import Site

TEMPLATES = Path(__file__).parent / "templates"
MARGIN_S = 60
"""Slurm sends the signal up to this much too early or, on a busy node, late (s)."""
EXPORTED = (
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME", "HF_HOME",
    "OMP_NUM_THREADS", "MSRL_LOG_LEVEL", "MODULEPATH", "SLURM_CONF", "TMPDIR",
)  # fmt: skip
"""Variables of the submitting shell that the job gets; others, secrets among them, stay there."""


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Everything that the job script says."""

    name: str
    script: Path
    """Where the script is written; its outputs go to the same folder."""
    runs: tuple[Path, ...]
    """Folders of the runs, absolute; more than one: tasks of an array."""
    cwd: Path
    """Folder of the submission, to which the paths in the recipes are relative."""
    request: Request
    nodes: Allocation
    engines: Allocation | None
    """Component 1 of a heterogeneous job; then `nodes` are those of component 0, without engines."""
    lead_s: int
    """Seconds before the time limit at which the run is asked to save and exit."""
    startup_s: int
    """Seconds until the first step: a budget that is left for fewer counts as spent."""
    site: Site

    @property
    def several(self) -> bool:
        """Whether the job has more than one node."""
        return self.nodes.nodes > 1 or self.engines is not None

    @property
    def outputs(self) -> str:
        """Name of the job's output files, in Slurm's notation."""
        folder = str(self.script.parent).replace("%", "%%")
        return f"{folder}/%A_%a.out" if self.request.throttle else f"{folder}/%j.out"


def render(plan: JobPlan) -> str:
    """The text of the job script.

    Raises ValueError for a value that would end its line in the script, and for a path that sbatch would change.
    """
    asked, engines = plan.request, plan.engines
    train = ["train", "--supervise", "--max-failures", str(asked.max_failures)]
    check = ["doctor", "--hosts", "slurm", "--gpus", str(plan.nodes.gpus), "--within", f"{asked.check_seconds:g}"]
    budget = ["submit", "--gpu-hours", f"{asked.gpu_hours or 0:g}", "--seconds-left"]
    if plan.several:
        train += ["--hosts", "slurm", "--slots", str(plan.nodes.slots)]
    if engines is not None:
        train += ["--engine-slots", str(engines.slots)]
        check += ["--engine-gpus", str(engines.gpus)]
    options = list(_options(plan))
    for text in map(str, [*options, plan.script, *plan.runs, plan.cwd]):
        if not text.isprintable():
            raise ValueError(f"submit: a job script cannot hold line breaks or control characters: {text!r}")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # a shell script: every value passes through `quote`
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template("job.sbatch").render(
        modules=plan.site.modules,
        environment=plan.site.environment,
        options=options,
        script=plan.script,
        runs=plan.runs,
        cwd=plan.cwd,
        nodes=plan.nodes.nodes + (engines.nodes if engines is not None else 0),
        heterogeneous=engines is not None,
        chain=asked.chain,
        max_requeues=asked.max_requeues,
        cpus=plan.nodes.cpus,
        gpu_hours=asked.gpu_hours,
        startup_s=plan.startup_s,
        command=_command(plan, train),
        preflight=_command(plan, check),
        budget=_command(plan, budget),
    )


def _options(plan: JobPlan) -> Iterator[str]:
    """What follows #SBATCH, line by line."""
    asked, site = plan.request, plan.site
    requeue = "--no-requeue" if asked.chain else "--requeue"
    more = [f"--signal=B:USR1@{plan.lead_s}", requeue, "--open-mode=append"]
    more += [f"--output={escaped(plan.outputs)}", f"--export={','.join(EXPORTED)}"]
    if asked.throttle:
        more.append(f"--array=0-{len(plan.runs) - 1}%{asked.throttle}")
    more += site.options(site.sbatch)
    yield from _job_options(plan.name, asked.partition, asked.time, plan.nodes, more, several=plan.several)
    if plan.engines is not None:
        yield "hetjob"
        # 22.05: components of one name wait for each other (singleton)
        name, partition = f"{plan.name}-engines", asked.engine_partition or asked.partition
        more = [requeue, *site.options(site.engine_sbatch)]
        yield from _job_options(name, partition, asked.time, plan.engines, more, several=True)


def _job_options(
    name: str, partition: str, limit: str, nodes: Allocation, more: Iterable[str], *, several: bool
) -> Iterator[str]:
    """Options of sbatch for one component of a job.

    limit: of its time. more: options that follow. several: whether the job has more nodes than one.
    """
    yield f"--job-name={escaped(name)}"
    yield f"--partition={partition}"
    yield f"--time={limit}"
    yield f"--nodes={nodes.nodes}"
    yield "--ntasks-per-node=1"
    if several:
        yield "--no-kill"  # the job goes on where a node fails that is not its first
    if nodes.gpus:
        yield f"--gpus-per-node={nodes.gpus}"
    if nodes.cpus is None:
        yield "--exclusive"
        yield "--mem=0"
    else:
        yield f"--cpus-per-task={nodes.cpus}"
    yield from more


def escaped(text: str) -> str:
    """A path or a name as it follows #SBATCH. Raises ValueError for characters that sbatch reads as its own."""
    if set(text) & set("\"'\\"):
        raise ValueError(f"submit: sbatch does not take quotes and backslashes in a path or a name: {text}")
    return f'"{text}"' if " " in text else text


def _command(plan: JobPlan, words: Sequence[str]) -> str:
    """A command of the program, in the site's container; a path follows it."""
    site = plan.site
    default = (sys.executable, "-m", "megatron_scalerl") if site.container == "none" else ("megatron-scalerl",)
    program = [*(site.program or default), *words]
    if site.container == "none":
        return shlex.join(program)
    folders = [f"{plan.cwd}:{plan.cwd}", *site.mounts]
    if site.container == "pyxis":
        start = ["srun", "--ntasks=1", f"--container-image={site.image}", "--no-container-mount-home"]
        start.append(f"--container-workdir={plan.cwd}")
        mounts = shlex.quote(",".join(folders))
        return f'{shlex.join(start)} --container-mounts={mounts},"$run:$run" {shlex.join(program)}'
    bound = [word for folder in folders for word in ("--bind", folder)]
    start = ["apptainer", "exec", *(["--nv"] if plan.nodes.gpus else []), "--pwd", str(plan.cwd), *bound]
    return f'{shlex.join(start)} --bind "$run:$run" {shlex.join([str(site.image), *program])}'

"""The job script of one run, or of an array of runs: what is in it, and its text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_scalerl.slurm.site import Site

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
    partition: str
    time: str
    """Time limit of one job, in Slurm's notation."""
    gpus: int
    cpus: int | None
    """CPUs of the run, None for a whole node."""
    lead_s: int
    """Seconds before the time limit at which the run is asked to save and exit."""
    max_requeues: int
    """How often one job is queued again; with `chain`, jobs after the first."""
    chain: bool = False
    throttle: int | None = None
    """Tasks of an array that run at a time."""
    max_failures: int
    """Starts after a failure without a new checkpoint, within one job."""
    site: Site

    @property
    def outputs(self) -> str:
        """Name of the job's output files, in Slurm's notation."""
        return str(self.script.parent / ("%A_%a.out" if self.throttle else "%j.out"))


def render(plan: JobPlan) -> str:
    """The text of the job script."""
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
        options=list(_options(plan)),
        script=plan.script,
        runs=plan.runs,
        cwd=plan.cwd,
        chain=plan.chain,
        max_requeues=plan.max_requeues,
        modules=plan.site.modules,
        environment=plan.site.environment,
        cpus=plan.cpus,
        command=_command(plan),
    )


def _options(plan: JobPlan) -> Iterator[str]:
    """What follows #SBATCH, line by line; the site's own lines last, so that they win."""
    yield f"--job-name={plan.name}"
    yield f"--partition={plan.partition}"
    yield f"--time={plan.time}"
    yield "--nodes=1"
    yield "--ntasks=1"
    if plan.gpus:
        yield f"--gpus-per-node={plan.gpus}"
    if plan.cpus is None:
        yield "--exclusive"
        yield "--mem=0"
    else:
        yield f"--cpus-per-task={plan.cpus}"
    yield f"--signal=B:USR1@{plan.lead_s}"
    yield "--no-requeue" if plan.chain else "--requeue"
    yield "--open-mode=append"
    yield f"--output={_escaped(plan.outputs)}"
    if plan.throttle:
        yield f"--array=0-{len(plan.runs) - 1}%{plan.throttle}"
    yield f"--export={','.join(EXPORTED)}"
    yield from (f"--{key}={value}" for key in ("account", "qos") if (value := getattr(plan.site, key)))
    yield from plan.site.sbatch


def _escaped(path: str) -> str:
    return f'"{path}"' if " " in path else path


def _command(plan: JobPlan) -> str:
    """The command that starts a run, without its recipe."""
    site = plan.site
    default = (sys.executable, "-m", "megatron_scalerl") if site.container == "none" else ("megatron-scalerl",)
    program = [*(site.program or default), "train", "--supervise", "--max-failures", str(plan.max_failures)]
    if site.container == "none":
        return shlex.join(program)
    folders = [f"{plan.cwd}:{plan.cwd}", *site.mounts]
    if site.container == "pyxis":
        start = ["srun", "--ntasks=1", f"--container-image={site.image}", "--no-container-mount-home"]
        start.append(f"--container-workdir={plan.cwd}")
        mounts = shlex.quote(",".join(folders))
        return f'{shlex.join(start)} --container-mounts={mounts},"$run:$run" {shlex.join(program)}'
    bound = [word for folder in folders for word in ("--bind", folder)]
    start = ["apptainer", "exec", *(["--nv"] if plan.gpus else []), "--pwd", str(plan.cwd), *bound]
    return f'{shlex.join(start)} --bind "$run:$run" {shlex.join([str(site.image), *program])}'

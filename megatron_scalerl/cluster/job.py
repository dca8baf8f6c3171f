"""The job script of one run, or of an array of runs: what is in it, and its text."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

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
class EngineNodes:
    """Nodes of a component of its own for the engines, whole ones."""

    partition: str
    nodes: int
    gpus: int
    """GPUs of a node, 0 for a run on CPUs."""
    slots: int
    """Engine devices of a node."""


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
    nodes: int = 1
    gpus: int
    """GPUs of a node, 0 for a run on CPUs."""
    slots: int | None = None
    """Ranks and engine devices of a node, where there are several."""
    cpus: int | None
    """CPUs of a node, None for whole nodes."""
    lead_s: int
    """Seconds before the time limit at which the run is asked to save and exit."""
    max_requeues: int
    """How often one job is queued again; with `chain`, jobs after the first."""
    chain: bool = False
    throttle: int | None = None
    """Tasks of an array that run at a time."""
    max_failures: int
    """Starts after a failure without a new checkpoint, within one job."""
    gpu_hours: float | None = None
    """Device-hours of the run, after which the job is not queued again."""
    startup_s: int = 0
    """Seconds until the first step: a budget that is left for fewer counts as spent."""
    check_s: float
    """Seconds within which each of several nodes has to report."""
    engines: EngineNodes | None = None
    """Component 1 of a heterogeneous job; then the fields above are those of component 0, without engines."""
    site: Site

    @property
    def several(self) -> bool:
        """Whether the job has more than one node."""
        return self.nodes > 1 or self.engines is not None

    @property
    def outputs(self) -> str:
        """Name of the job's output files, in Slurm's notation."""
        folder = str(self.script.parent).replace("%", "%%")
        return f"{folder}/%A_%a.out" if self.throttle else f"{folder}/%j.out"


def render(plan: JobPlan) -> str:
    """The text of the job script."""
    train = ["train", "--supervise", "--max-failures", str(plan.max_failures)]
    check = ["doctor", "--hosts", "slurm", "--gpus", str(plan.gpus), "--within", f"{plan.check_s:g}"]
    if plan.several:
        train += ["--hosts", "slurm", "--slots", str(plan.slots)]
    if plan.engines is not None:
        train += ["--engine-slots", str(plan.engines.slots)]
        check += ["--engine-gpus", str(plan.engines.gpus)]
    return rendered(
        "job.sbatch",
        plan.site,
        options=list(_options(plan)),
        script=plan.script,
        runs=plan.runs,
        cwd=plan.cwd,
        nodes=plan.nodes + (plan.engines.nodes if plan.engines is not None else 0),
        heterogeneous=plan.engines is not None,
        chain=plan.chain,
        max_requeues=plan.max_requeues,
        cpus=plan.cpus,
        gpu_hours=plan.gpu_hours,
        startup_s=plan.startup_s,
        command=_command(plan, train),
        preflight=_command(plan, check),
        budget=_command(plan, ["submit", "--gpu-hours", f"{plan.gpu_hours:g}", "--seconds-left"])
        if plan.gpu_hours
        else "",
    )


def runs_of(text: str) -> list[Path]:
    """Folders of the runs in the text of a job script; none if it is another script."""
    found = re.search(r"^runs=\(\n((?: .+\n)+)\)$|^run=(?!\$)(.+)$", text, re.MULTILINE)
    try:
        return [Path(word) for word in shlex.split(found[1] or found[2])] if found else []
    except ValueError:  # edited by hand
        return []


def rendered(template: str, site: Site, **values: object) -> str:
    """A template with the site's modules and variables.

    Raises ValueError for a value that would end its line in the script, and for a path that sbatch would change.
    """
    for value in map(values.get, ("options", "script", "run", "runs", "cwd")):
        for text in map(str, value if isinstance(value, list | tuple) else [value]):
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
    return environment.get_template(template).render(modules=site.modules, environment=site.environment, **values)


def _options(plan: JobPlan) -> Iterator[str]:
    """What follows #SBATCH, line by line."""
    yield f"--job-name={escaped(plan.name)}"
    yield f"--partition={plan.partition}"
    yield f"--time={plan.time}"
    yield from nodes_options(plan.nodes, plan.gpus, plan.cpus, several=plan.several)
    yield f"--signal=B:USR1@{plan.lead_s}"
    yield "--no-requeue" if plan.chain else "--requeue"
    yield "--open-mode=append"
    yield f"--output={escaped(plan.outputs)}"
    if plan.throttle:
        yield f"--array=0-{len(plan.runs) - 1}%{plan.throttle}"
    yield f"--export={','.join(EXPORTED)}"
    yield from site_options(plan.site, plan.site.sbatch)
    if plan.engines is not None:
        yield from _engine_options(plan, plan.engines)


def _engine_options(plan: JobPlan, engines: EngineNodes) -> Iterator[str]:
    """Those of component 1."""
    yield "hetjob"
    # 22.05: components of one name wait for each other (singleton)
    yield f"--job-name={escaped(plan.name + '-engines')}"
    yield f"--partition={engines.partition}"
    yield f"--time={plan.time}"
    yield from nodes_options(engines.nodes, engines.gpus, None, several=True)
    yield "--no-requeue" if plan.chain else "--requeue"
    yield from site_options(plan.site, plan.site.engine_sbatch)


def nodes_options(nodes: int, gpus: int, cpus: int | None, *, several: bool) -> Iterator[str]:
    """Options of sbatch for so many nodes with so many GPUs and CPUs each; cpus None: whole nodes.

    several: whether the job has more nodes than one.
    """
    yield f"--nodes={nodes}"
    yield "--ntasks-per-node=1"
    if several:
        yield "--no-kill"  # the job goes on where a node fails that is not its first
    if gpus:
        yield f"--gpus-per-node={gpus}"
    if cpus is None:
        yield "--exclusive"
        yield "--mem=0"
    else:
        yield f"--cpus-per-task={cpus}"


def site_options(site: Site, more: Sequence[str]) -> Iterator[str]:
    """The site's own options, which come last, so that they win."""
    yield from (f"--{key}={value}" for key in ("account", "qos") if (value := getattr(site, key)))
    yield from more


def escaped(text: str) -> str:
    """A path or a name as it follows #SBATCH. Raises ValueError for characters that sbatch reads as its own."""
    if set(text) & set("\"'\\"):
        raise ValueError(f"submit: sbatch does not take quotes and backslashes in a path or a name: {text}")
    return f'"{text}"' if " " in text else text


def program_of(site: Site) -> list[str]:
    """The words that start the program."""
    default = (sys.executable, "-m", "megatron_scalerl") if site.container == "none" else ("megatron-scalerl",)
    return list(site.program or default)


def _command(plan: JobPlan, words: Sequence[str]) -> str:
    """A command of the program, in the site's container; a path follows it."""
    site, program = plan.site, [*program_of(plan.site), *words]
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

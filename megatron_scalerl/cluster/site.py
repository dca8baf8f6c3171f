"""The site file: settings that all jobs of one cluster share.

`sbatch` holds options by the names of sbatch. These options are added to the job's options and replace a job's option
of the same meaning. An option that the job cannot do without is refused by name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StrictBool, StringConstraints, ValidationError

from megatron_scalerl.cluster.cluster import gpus_of
from megatron_scalerl.launch.hosts import is_secret
from megatron_scalerl.plan.assumptions import first_line
from megatron_scalerl.recipe.file import read_yaml
from megatron_scalerl.recipe.other_names import check_keys

_CONTAINER_KINDS = ("none", "pyxis", "apptainer")
_NOT_A_NAME = re.compile(r"=|\b(ALL|NONE|NIL|TRUE|FALSE)\b", re.IGNORECASE)
_PRINTED = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]"
Line = Annotated[str, StringConstraints(pattern=f"^{_PRINTED}+$")]
"""Text of a single line, without control characters."""
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Options = Mapping[str, str | bool]
"""Option of sbatch, without dashes -> value. True is an option without a value; False removes the job's option."""
BY_SUBMIT = {
    "partition": "--partition",
    "time": "--time",
    "nodes": "--nodes",
    "array": "--array",
    "cpus-per-task": "--cpus",
    "gpus": "--gpus-per-node",
    "requeue": "--max-requeues",
    "no-requeue": "--chain",
}
"""Option of sbatch -> the option of `submit` that sets it."""
_FIXED_OPTIONS = (
    *("signal", "output", "open-mode", "no-kill", "ntasks", "ntasks-per-node", "chdir", "wrap", "wait", "test-only"),
    *("parsable", "gpus-per-task", "export-file", "ntasks-per-gpu", "time-min", "clusters"),
)
"""Options of sbatch that a site file may not set: the job sets the options, in order to save the run, to be queued
again and to be watched."""
_REPLACED_OPTIONS = {
    "gres": "gpus-per-node",
    "mem-per-gpu": "mem",
    "mem-per-cpu": "mem",
    "oversubscribe": "exclusive",
    "cpus-per-gpu": "cpus-per-task",
}
"""Option of sbatch in the site file -> the job's option that is then left out."""


class Site(BaseModel):
    """Settings that a cluster requires of every job script, such as account, modules and container. Read by
    `read_site`."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    sbatch: dict[Name, Line | StrictBool] = {}
    """Options of sbatch, such as account, qos and gres."""
    modules: tuple[Line, ...] = ()
    """Environment modules, loaded in this order."""
    environment: dict[Variable, Line] = {}
    """Variables of the run's processes, such as NCCL's variables."""
    program: tuple[Line, ...] = ()
    """Words that start the program. Empty: the Python of the submission, or `megatron-scalerl` in a container."""
    local: Annotated[str, StringConstraints(pattern=r"^[/$][\w./${}-]*$")] = "/tmp"
    """Folder on each node's disk for compiled files. The path may name variables, such as $USER."""
    template: Line | None = None
    """Path of the job script's template (Jinja), relative to the site file; None for job.sbatch.

    A template may extend job.sbatch."""
    container: Literal["none", "pyxis", "apptainer"] | tuple[Line, ...] = "none"
    """The container of the program, on every node. A list of words is a command that starts the program in another
    kind of container; {run}, {cwd} and {local} are replaced by the folders of the run, of the submission, and of
    compiled files."""
    image: Line | None = None
    """Image of the container of pyxis or Apptainer."""
    mounts: tuple[Line, ...] = ()
    """SOURCE:TARGET for each folder that the container sees, besides the folders of the submission and of the run."""

    @property
    def exclusive(self) -> bool:
        """Whether a job that takes all GPUs of a node may reserve the whole node (sbatch --exclusive)."""
        return self.sbatch.get("exclusive", "oversubscribe" not in self.sbatch) is True

    @property
    def gres(self) -> str:
        """The GPUs of a node that the site's options request, as Slurm's generic resources; the number may be
        missing."""
        return str(self.sbatch.get("gres") or "gpu:" + str(self.sbatch.get("gpus-per-node") or ""))

    def options(self, job_options: Options, *, gpus: int) -> list[str]:
        """The text of each #SBATCH line, from the job's options and the site's options.

        gpus: GPUs that the job takes of each node. If the site's options name a type of GPU without a number, the
        number is `gpus`. Raises ValueError if the site's options request fewer GPUs.
        """
        site_options = {name: value for name, value in self.sbatch.items() if gpus or not _requests_gpus(name, value)}
        if _requests_gpus("gres", site_options.get("gres")):
            site_options["gres"] = _numbered(str(site_options["gres"]), gpus)
        elif site_options.get("gpus-per-node"):
            site_options["gpus-per-node"] = _numbered(f"gpu:{site_options['gpus-per-node']}", gpus).removeprefix(
                "gpu:"
            )
        if "export" in site_options and "export" in job_options:
            site_options["export"] = f"{job_options['export']},{site_options['export']}"
        replaced = {
            _REPLACED_OPTIONS.get(name)
            for name, value in site_options.items()
            if name != "gres" or _requests_gpus(name, value)
        }
        merged_options = {name: value for name, value in job_options.items() if name not in replaced} | site_options
        lines = []
        for name, value in merged_options.items():
            if value is True:
                lines.append(f"--{name}")
            elif value:
                lines.append(f"--{name}={escaped(str(value))}")
        return lines


def escaped(text: str) -> str:
    """A value for a line of #SBATCH. Raises ValueError for quotes and backslashes, which sbatch interprets."""
    if set(text) & set("\"'\\"):
        raise ValueError(f"submit: sbatch does not take quotes and backslashes in a path or a name: {text}")
    if set(text) & set(" #"):
        return f'"{text}"'
    return text


def _requests_gpus(name: str, value: object) -> bool:
    """Whether an option requests GPUs, or a resource for each GPU, such as mem-per-gpu."""
    return "gpu" in name or (name == "gres" and re.search(r"(?:^|,)gpu(?:[:,]|$)", str(value)) is not None)


def _numbered(gres: str, gpus: int) -> str:
    """`gres` with the number `gpus` added to GPUs without a number. Raises ValueError if the result has fewer
    than `gpus` GPUs."""
    # matches `gpu` and `gpu:h100`, which give no number, but neither `gpu:4` nor `gpu:h100:4`
    numbered = re.sub(r"(?<![^,])gpu(?::(?!\d+(?:,|$))[^:,]*)?(?=,|$)", lambda match: f"{match[0]}:{gpus}", gres)
    if gpus_of(numbered) < gpus:
        raise ValueError(f"site file: sbatch: {gres} requests fewer GPUs of a node than the run takes, {gpus}")
    return numbered


def read_site(path: Path | None) -> Site:
    """The site file (YAML); without a path the defaults. Raises ValueError for an invalid setting, with file, key and
    nearest known key."""
    if path is None:
        return Site()
    data = {key: value for key, value in read_yaml(path).items() if value is not None}
    expected = "a key of a site file (options of sbatch go under sbatch: {account: ...})"
    check_keys(str(path), data, Site.model_fields, expected=expected)
    # Look for secrets first: other checks print an invalid value in the error, and so might print a secret.
    variables = data["environment"] if isinstance(data.get("environment"), dict) else {}
    for variable, text in variables.items():
        if is_secret(str(variable), str(text)):
            raise ValueError(
                f"{path}: environment: {variable} looks like a secret, and others can read the job script; let the "
                "program read it from a file that only you can read"
            )
    for key, value in data.items():
        if is_secret("", str(value)):
            raise ValueError(f"{path}: {key} holds what looks like a secret, which others can read in the job script")
    try:
        site = Site.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_line(error)}") from None
    for name, value in site.sbatch.items():
        if name in BY_SUBMIT:
            raise ValueError(f"{path}: sbatch: {name} is set by the option {BY_SUBMIT[name]} of submit; remove it")
        if name in _FIXED_OPTIONS:
            raise ValueError(f"{path}: sbatch: {name} is set by the job itself; remove {name}")
        if name in ("export", "gpus-per-node") and _NOT_A_NAME.search(str(value)):
            raise ValueError(f"{path}: sbatch.{name}: {value} is not a list of names without = and ALL")
    if (site.container in _CONTAINER_KINDS[1:]) != (site.image is not None):
        raise ValueError(
            f"{path}: image is required with container pyxis or apptainer, and refused otherwise; container is "
            f"{site.container}"
        )
    if site.template is not None:
        site = site.model_copy(update={"template": str(path.absolute().parent / site.template)})
        if not Path(str(site.template)).is_file():
            raise ValueError(f"{path}: template: {site.template} is not a file")
    return site

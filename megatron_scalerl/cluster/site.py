"""The site file: what the jobs of one cluster have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from megatron_scalerl.recipe.file import read_yaml
from megatron_scalerl.recipe.other_names import check_keys

Container = Literal["none", "pyxis", "apptainer"]
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|API_?KEY)S?$", re.IGNORECASE)
_PRINTED = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]"
Line = Annotated[str, StringConstraints(pattern=f"^{_PRINTED}+$")]
"""One line of text."""
Option = Annotated[str, StringConstraints(pattern=f"^-{_PRINTED}*$")]
Word = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f]+$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_EXPECTED = {
    **dict.fromkeys(("account", "qos"), "one word"),
    **dict.fromkeys(
        ("sbatch", "engine_sbatch"), "options of sbatch on one line of text each, such as --constraint=h100"
    ),
    **dict.fromkeys(("modules", "program", "mounts"), "a list of texts"),
    "environment": "names of variables with one line of text each",
    "container": f"one of {', '.join(get_args(Container))}",
    "image": "text",
}
"""By key."""


class Site(BaseModel):
    """Lines of a job script that the cluster asks for. Read by `read_site`."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    sbatch: tuple[Option, ...] = ()
    """Further options of sbatch, each as it follows #SBATCH."""
    engine_sbatch: tuple[Option, ...] = ()
    """The same for component 1 of a heterogeneous job, the engines' nodes, instead of `sbatch`."""
    modules: tuple[Line, ...] = ()
    """Environment modules, loaded in this order."""
    environment: dict[Variable, Line] = {}
    """Variables of the run's processes, such as those of NCCL."""
    program: tuple[Line, ...] = ()
    """Words that start the program; none: the Python of the submission, or `megatron-scalerl` in a container."""
    container: Container = "none"
    image: Line | None = None
    """Image of the container."""
    mounts: tuple[Line, ...] = ()
    """SOURCE:TARGET for each folder that the container sees; the folder of the submission and the run's always."""

    def options(self, more: Sequence[str]) -> list[str]:
        """Options of sbatch that come last, so that they win. more: `sbatch` or `engine_sbatch`."""
        named = [f"--{key}={value}" for key, value in (("account", self.account), ("qos", self.qos)) if value]
        return [*named, *more]


def read_site(path: str | Path | None) -> Site:
    """The site file (YAML), or none. Raises ValueError naming file and key, for an unknown key the nearest one."""
    if path is None:
        return Site()
    data = {key: value for key, value in read_yaml(Path(path)).items() if value is not None}
    check_keys(str(path), data, Site.model_fields, expected="a key of a site file")
    for name in data["environment"] if isinstance(data.get("environment"), dict) else ():
        if _SECRET.search(str(name)):
            raise ValueError(
                f"{path}: environment: expected no secret, since the job script is readable by others, found {name}; "
                "let the program read it from a file that only you can read"
            )
    try:
        site = Site.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        where = f"{path}: {'.'.join(str(part) for part in first['loc'] if part != '[key]')}"
        raise ValueError(f"{where}: expected {_EXPECTED[key]}, found {first['input']!r}") from None
    if (site.container != "none") != (site.image is not None):
        raise ValueError(f"{path}: image: expected with a container, and only then, found container {site.container}")
    return site

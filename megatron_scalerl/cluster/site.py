"""The site file: what the jobs of one cluster have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_scalerl.recipe.file import read_yaml
from megatron_scalerl.recipe.other_names import check_keys

CONTAINERS = ("none", "pyxis", "apptainer")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|API_?KEY)S?$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Lines of a job script that the cluster asks for. Read by `read_site`, which checks every value."""

    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each as it follows #SBATCH."""
    engine_sbatch: tuple[str, ...] = ()
    """The same for component 1 of a heterogeneous job, the engines' nodes, instead of `sbatch`."""
    modules: tuple[str, ...] = ()
    """Environment modules, loaded in this order."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the run's processes, such as those of NCCL."""
    program: tuple[str, ...] = ()
    """Words that start the program; none: the Python of the submission, or `megatron-scalerl` in a container."""
    container: str = "none"
    """One of CONTAINERS."""
    image: str | None = None
    """Image of the container."""
    mounts: tuple[str, ...] = ()
    """SOURCE:TARGET for each folder that the container sees; the folder of the submission and the run's always."""


def read_site(path: str | Path | None) -> Site:
    """The site file (YAML), or none. Raises ValueError naming file and key, for an unknown key the nearest one."""
    if path is None:
        return Site()
    data = read_yaml(Path(path))
    kinds = {each.name: each for each in fields(Site)}
    check_keys(str(path), data, kinds, expected="a key of a site file")
    values = {key: _checked(f"{path}: {key}", key, value) for key, value in data.items() if value is not None}
    site = Site(**values)
    if site.container not in CONTAINERS:
        raise ValueError(f"{path}: container: expected one of {', '.join(CONTAINERS)}, found {site.container}")
    if (site.container != "none") != (site.image is not None):
        raise ValueError(f"{path}: image: expected with a container, and only then, found container {site.container}")
    return site


def _checked(where: str, key: str, value: Any) -> Any:
    if key == "environment":
        return _environment(where, value)
    if key in ("sbatch", "engine_sbatch", "modules", "program", "mounts"):
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, found {value!r}")
        lines = tuple(_text(where, item) for item in value)
        for line in lines if key.endswith("sbatch") else ():
            if not line.startswith("-"):
                raise ValueError(f"{where}: expected options of sbatch, such as --constraint=h100, found {line}")
        return lines
    text = _text(where, value)
    if key in ("account", "qos") and re.search(r"\s", text):
        raise ValueError(f"{where}: expected one word, found {text!r}")
    return text


def _environment(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected variables with their values, found {value!r}")
    for name in value:
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"{where}: expected names of variables, found {name!r}")
        if _SECRET.search(str(name)):
            raise ValueError(
                f"{where}: expected no secret, since the job script is readable by others, found {name}; let the "
                "program read it from a file that only you can read"
            )
    return {str(name): _text(f"{where}.{name}", text) for name, text in value.items()}


def _text(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{where}: expected text, found {value!r}")
    text = str(value)
    if not text or not text.isprintable():
        raise ValueError(f"{where}: expected one line of text, found {text!r}")
    return text

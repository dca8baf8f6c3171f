"""A YAML file of measured constants that replace the planner's defaults: `plan --assumptions FILE`.

gpu: NVIDIA H100 80GB HBM3        # its name in CUDA, or the planner's --gpu; constants apply to one GPU
layers: plain                     # optional: layers of the measured trainer, see --layers
written: 2026-11-21
assumptions:
  dense_utilization:              # a field of `Assumptions`
    value: 0.37
    source: "measured: 8B shape, 4 layers, 16,384 tokens"   # optional
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.plan.assumptions import check_number, described
from megatron_scalerl.plan.hardware import GPUS, Layers, gpu_of_device
from megatron_scalerl.recipe.file import read_yaml
from megatron_scalerl.recipe.other_names import check_keys


class Measured(BaseModel):
    """One constant."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    value: float
    """In the unit of the field of `Assumptions`."""
    source: str | None = None
    """How it was measured; one line."""


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    gpu: str
    layers: Layers | None = None
    written: datetime.date | str | None = None
    assumptions: dict[str, Measured] = Field(min_length=1)


@dataclass(frozen=True, kw_only=True)
class AssumptionsFile:
    """The contents of a file. Produced by `read_assumptions`."""

    path: Path
    gpu: str
    """A key of `hardware.GPUS`."""
    gpu_named: str
    """The name in the file."""
    layers: Layers | None
    """None: valid for both."""
    written: str
    """Date, or an empty string."""
    values: Mapping[str, Measured]
    """By field of `Assumptions`."""

    def source(self, name: str) -> str:
        """One line: file, date, and how the value was measured."""
        when = f" of {self.written}" if self.written else ""
        how = " ".join((self.values[name].source or "").split())
        return f"{self.path}{when}" + (f": {how}" if how else "")


def write_assumptions(
    path: str | Path, values: Mapping[str, Measured], *, gpu: str, layers: Layers | None = None
) -> None:
    """Write the file atomically, dated today (UTC); `gpu` is the name in CUDA.

    Raises ValueError as `read_assumptions`, but for a GPU that the planner does not support; OSError.
    """
    today = datetime.datetime.now(datetime.UTC).date()
    rows = {name: each.model_dump(exclude_none=True) for name, each in values.items()}
    data = {"gpu": gpu} | ({"layers": layers} if layers else {}) | {"written": today, "assumptions": rows}
    _checked(Path(path), data)
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)
    write_durably(Path(path), ("# Measured constants: megatron-scalerl plan --assumptions FILE\n" + text).encode())


def read_assumptions(path: str | Path) -> AssumptionsFile:
    """The file's constants. Raises ValueError, in one line with file and key, for invalid contents."""
    path = Path(path)
    content = _checked(path, read_yaml(path, kind="an assumptions file"))
    gpu = gpu_of_device(content.gpu)
    if gpu is None:
        supported = ", ".join(sorted(GPUS))
        raise ValueError(f"{path}: gpu: expected one that the planner supports ({supported}), found {content.gpu!r}")
    return AssumptionsFile(
        path=path,
        gpu=gpu,
        gpu_named=content.gpu,
        layers=content.layers,
        written=str(content.written or ""),
        values=content.assumptions,
    )


def _checked(path: Path, data: dict[str, Any]) -> _Content:
    try:
        content = _Content.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key, found = ".".join(map(str, first["loc"])), repr(first["input"])[:60]
        raise ValueError(f"{path}: {key}: {first['msg'][0].lower()}{first['msg'][1:]}, found {found}") from None
    names = [f"assumptions.{f.name}" for f in described()]
    given = [f"assumptions.{name}" for name in content.assumptions]
    check_keys(
        str(path), given, names, expected="a key of an assumptions file", listed="megatron-scalerl plan --help"
    )
    for name, measured in content.assumptions.items():
        try:
            check_number(name, measured.value)
        except ValueError as error:
            raise ValueError(f"{path}: assumptions.{name}.value: {error}") from None
    return content

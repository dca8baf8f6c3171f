"""A YAML file of measured constants that replace the planner's defaults: `plan --assumptions FILE`.

gpu: NVIDIA H100 80GB HBM3        # its name in CUDA, or the planner's --gpu; constants apply to one GPU
layers: plain                     # optional: layers of the measured trainer, see --layers
written: 2026-11-21
assumptions:
  dense_utilization:              # a field of `Assumptions`
    value: 0.37
    source: "measured: 8B shape, 4 layers, 16,384 tokens"   # optional
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from megatron_scalerl.plan.assumptions import check_number, described
from megatron_scalerl.plan.hardware import GPUS, Layers, gpu_of_device
from megatron_scalerl.recipe.file import read_yaml
from megatron_scalerl.recipe.other_names import check_keys


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured constant."""

    value: Any
    """A number in the unit of the field of `Assumptions`."""
    source: str | None = None
    """How it was measured; one line."""


class AssumptionsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a file of measured constants."""

    gpu: str
    """Name of the GPU in CUDA; after `read_assumptions`, a key of `hardware.GPUS`."""
    layers: Layers | None = None
    """Layers of the measured trainer; None: the constants are valid for both."""
    written: Any = None
    """Date of the file."""
    assumptions: Annotated[dict[str, Measured], msgspec.Meta(min_length=1)]
    """Field of `Assumptions` -> constant."""

    def source(self, path: Path, name: str) -> str:
        """The file's path, its date, and how the value was measured, in one line."""
        text = str(path)
        if self.written:
            text += f" of {self.written}"
        if how := " ".join((self.assumptions[name].source or "").split()):
            text += f": {how}"
        return text


def read_assumptions(path: Path) -> AssumptionsFile:
    """The file's constants. Raises ValueError, in one line with file and key, for invalid contents."""
    try:
        content = msgspec.convert(read_yaml(path, kind="an assumptions file"), AssumptionsFile)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None
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
    gpu = gpu_of_device(content.gpu)
    if gpu is None:
        supported = ", ".join(sorted(GPUS))
        raise ValueError(f"{path}: gpu: the planner does not know {content.gpu!r}; it knows {supported}")
    return msgspec.structs.replace(content, gpu=gpu)

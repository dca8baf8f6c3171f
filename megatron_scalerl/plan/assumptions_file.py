"""A YAML file of measured constants that replace the planner's defaults: `plan --assumptions FILE`.

gpu: NVIDIA H100 80GB HBM3        # name in CUDA, or the planner's --gpu; constants apply to one GPU
layers: plain                     # optional: layers of the measured trainer, see --layers
written: 2026-11-21
assumptions:
  dense_utilization:              # a field of `Assumptions`
    value: 0.37
    source: "measured: 8B shape, 4 layers, 16,384 tokens"   # optional
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from megatron_scalerl.plan.assumptions import checked, described, first_line
from megatron_scalerl.plan.hardware import GPUS, Layers, gpu_of_device
from megatron_scalerl.recipe.file import read_yaml
from megatron_scalerl.recipe.other_names import check_keys
from megatron_scalerl.recipe.sections import Section


class Measured(Section):
    """A measured constant."""

    value: Annotated[float, Field(strict=True)]
    """A number in the unit of the field of `Assumptions`."""
    source: str | None = None
    """How the constant was measured, in one line."""


class AssumptionsFile(Section):
    """The contents of a file of measured constants."""

    gpu: str
    """Name of the GPU in CUDA; after `read_assumptions`, a key of `hardware.GPUS`."""
    layers: Layers | None = None
    """Layers of the measured trainer. None: the constants are valid for the layers `te` and `plain`."""
    written: Any = None
    """Date of the file."""
    assumptions: dict[str, Measured] = Field(min_length=1)
    """Field of `Assumptions` -> measured constant."""

    def source(self, path: Path, name: str) -> str:
        """The file's path, its date, and how the value was measured, in one line."""
        text = str(path)
        if self.written:
            text += f" of {self.written}"
        if method := " ".join((self.assumptions[name].source or "").split()):
            text += f": {method}"
        return text


def read_assumptions(path: Path) -> AssumptionsFile:
    """Read the file's constants. Raises ValueError for invalid contents, in one line with file and key."""
    data = read_yaml(path, kind="an assumptions file")
    try:
        content = AssumptionsFile.model_validate(data)
        names = [f.name for f in described()]
        check_keys("assumptions", content.assumptions, names, expected="an assumption", listed="plan --help")
        checked({name: measured.value for name, measured in content.assumptions.items()})
        gpu = gpu_of_device(content.gpu)
        if gpu is None:
            raise ValueError(f"gpu: the planner does not know {content.gpu!r}; it knows {', '.join(sorted(GPUS))}")
    except ValueError as error:
        line = first_line(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{path}: {line}") from None
    return content.model_copy(update={"gpu": gpu})

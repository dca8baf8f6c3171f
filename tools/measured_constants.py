"""Constants of the planner from several measurements, as the file that `plan --assumptions` reads."""

import datetime
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.plan.assumptions import checked, described

_LARGEST = ("runtime_gib", "fragmentation", "engine_overhead_gib")
"""Memory reserves of a plan: the largest measurement counts, of others the median."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Figures of one check."""

    layers: Literal["te", "plain"] | None
    """Of the measured trainer; None: no trainer's, or unknown."""
    figures: Mapping[str, Any]
    """By name; those that are fields of the planner's `Assumptions`, and within their range, count."""


def write_constants(path, measured, *, gpu, source):
    """Write the constants for one kind of layers, Transformer Engine's if both were measured; returns them.

    Without any, nothing is written. gpu: its name in CUDA.
    """
    layers = {m.layers for m in measured if m.layers and _usable(m.figures)}
    kept = next((kind for kind in ("te", "plain") if kind in layers), None)
    found = {}
    for measurement in measured:
        if measurement.layers in (None, kept):
            for name, value in _usable(measurement.figures).items():
                found.setdefault(name, []).append(value)
    values = {name: max(v) if name in _LARGEST else statistics.median(v) for name, v in found.items()}
    if values:
        content = {
            "gpu": gpu,
            **({"layers": kept} if kept else {}),
            "written": datetime.datetime.now(datetime.UTC).date(),
            "assumptions": {name: {"value": value, "source": source} for name, value in values.items()},
        }
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
        write_durably(path, f"# Measured constants: megatron-scalerl plan --assumptions FILE\n{text}".encode())
    return values


def _usable(figures):
    found = {}
    for name in figures.keys() & {field.name for field in described()}:
        try:
            found[name] = getattr(checked({name: figures[name]}), name)
        except ValueError:
            continue
    return found

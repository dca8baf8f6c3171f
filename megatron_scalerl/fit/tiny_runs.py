"""The tiny runs that ship with the package, a second world of curves beside the published ones: data/tiny/README.md.

Which of them a method may learn from is decided by their place in data/tiny/table.csv, before any of them ran.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_scalerl.fit.sigmoid import Array

DATA = Path(__file__).parent / "data" / "tiny"
BLOCK = 3
"""Rows of the table in one block: variants of one regime. The last of each is held back."""


@dataclass(frozen=True, kw_only=True)
class TinyRun:
    """One run."""

    name: str
    held_back: bool
    """True: it scores a method that is frozen, and informs none."""
    row: Mapping[str, str] = field(repr=False)
    """Its row of the table: problems, policy, warm start, steps, learning rate, batch, seed."""
    overrides: Mapping[str, str] = field(repr=False)
    """The differences from recipes/tiny_cpu.yaml."""
    ended: str
    """Why it ended."""
    prompts: int
    """Held-out prompts of every validation."""
    step: NDArray[np.int64] = field(repr=False)
    """[n] optimizer step of each validation, from 0."""
    compute: Array = field(repr=False)
    """[n] model TFLOPs of training up to it, 0 at step 0."""
    pass_rate: Array = field(repr=False)
    """[n]"""
    generations: NDArray[np.int64] = field(repr=False)
    """[n] completions per prompt."""
    within_variance: Array = field(repr=False)
    """[n] mean over prompts of the variance of one completion; NaN with one generation."""
    outcomes: tuple[str | None, ...] = field(repr=False)
    """[n] what each completion was, see `correct`; None where one was lost."""
    training: Mapping[str, Array] = field(repr=False)
    """Column -> [batches] value, NaN where a batch has none: see data/tiny/README.md."""

    def correct(self, number: int) -> NDArray[np.bool_] | None:
        """[prompts, generations] which completions of a validation were correct; None if one was lost."""
        digits = self.outcomes[number]
        if digits is None:
            return None
        shape = (self.prompts, int(self.generations[number]))
        bits = bin(int(digits, 16))[2:].zfill(shape[0] * shape[1])
        return (np.frombuffer(bits.encode(), dtype=np.uint8) == ord("1")).reshape(shape)


def tiny_runs(*, held_back: bool | None = None, data: Path = DATA) -> list[TinyRun]:
    """The runs that have been made, in the order of the table. held_back: those, the others, or (None) all.

    Raises ValueError for a file that is not as data/tiny/README.md describes it.
    """
    with open(data / "table.csv", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    chosen = [(row, number % BLOCK == BLOCK - 1) for number, row in enumerate(rows)]
    return [
        _read(data / f"{row['name']}.json", row, held)
        for row, held in chosen
        if held_back in (None, held) and (data / f"{row['name']}.json").exists()
    ]


def _read(path: Path, row: Mapping[str, str], held_back: bool) -> TinyRun:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        points: dict[str, list[Any]] = found["validations"]
        run = TinyRun(
            name=row["name"],
            held_back=held_back,
            row=row,
            overrides=found["overrides"],
            ended=found["ended"],
            prompts=found["prompts"],
            step=np.array(points["step"]),
            generations=np.array(points["generations"]),
            outcomes=tuple(points["outcomes"]),
            training={name: np.array(column, dtype=float) for name, column in found["training"].items()},
            **{name: np.array(points[name], dtype=float) for name in _NUMBERS},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the columns of a tiny run, found {type(error).__name__}: {error}"
        ) from None
    lengths = {name: len(column) for name, column in points.items()}
    if found["name"] != row["name"] or len(set(lengths.values())) != 1 or run.step[0] != 0:
        raise ValueError(f"{path}: expected {row['name']} from step 0, columns of one length, found {lengths}")
    return run


_NUMBERS = ("compute", "pass_rate", "within_variance")

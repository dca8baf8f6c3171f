"""The validation points of one run: the input of every fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.record import record


@record
class Curve:
    """The validation points of one run, checked, sorted by compute."""

    name: str
    """Name of the run: the name of the folder or file, or the value of --series."""
    source: Path
    """Path of the input."""
    compute: Array = field(repr=False)
    """[n] compute of each point, above 0, ascending."""
    pass_rate: Array = field(repr=False)
    """[n] pass rate of each point, in [0, 1]."""
    initial: float | None
    """R_0 from a point at step 0 or compute 0; None without such a point."""
    prompts: int | None
    """Number of prompts of the validation set; None if not recorded."""
    generations: Array | None = field(repr=False)
    """[n] generations per prompt; None if not recorded."""
    initial_generations: int | None = None
    """Generations per prompt with which R_0 was measured; None if not recorded."""
    within_variance: Array | None = field(repr=False, default=None)
    """[n] mean over prompts of one completion's variance, NaN where not measured; None if no point was measured."""
    initial_within_variance: float | None = None
    """Mean over prompts of one completion's variance where R_0 was measured; None if not measured."""
    truncated_share: Array | None = field(repr=False, default=None)
    """[n] share of truncated completions; None if not recorded."""
    unit: str = "gpu_hours"
    """Unit of compute: a name such as "gpu_hours" or "steps", or the name of a column."""
    notes: tuple[str, ...] = ()
    """Corrections made while reading, such as rows that were left out, one sentence each."""
    read: str = ""
    """One line on the input: name, layout, columns, points; "" for points that were not read from a file."""
    recipe: Mapping[str, Any] | None = field(repr=False, default=None)
    """Key path -> value in the run folder's recipe.yaml; None without the file."""
    seed: int | None = None
    """Seed of the run, from the recipe or from the column seed of a table."""
    arm: str | None = None
    """Name of the run's recipe, equal for all seeds: in a study the recipe's name, for a table with --series the
    values of the columns other than seed; else None."""

    @property
    def completions(self) -> Array | None:
        """[n] prompts x generations of each point; None if unknown."""
        if self.prompts is None or self.generations is None:
            return None
        return self.prompts * self.generations

    def part(self, selection: NDArray[Any]) -> Curve:
        """The run with the selected points alone. selection: [n] booleans, or indices."""
        names = ("compute", "pass_rate", "generations", "within_variance", "truncated_share")
        columns = {name: getattr(self, name) for name in names}
        return replace(self, **{name: column[selection] for name, column in columns.items() if column is not None})

"""What a study has found so far: table, plots and page, by the comparison of `fit --compare`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from megatron_scalerl.checkpoints.atomic_io import sync, write_durably
from megatron_scalerl.commands.study.folder import StudyFolder
from megatron_scalerl.fit.compare import Comparison, compare_runs, conclusions, summary
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.forecast import fit_curve
from megatron_scalerl.fit.inputs import ColumnOptions, read_curves
from megatron_scalerl.fit.plot import plot_comparison, plot_curves
from megatron_scalerl.fit.result import FitResult
from megatron_scalerl.fit.tables import comparison_json, comparison_table, html_page

TABLE, JSON, PAGE = "table.md", "comparison.json", "study.html"
FIGURES = {
    "study.png": "A, B at equal A and compute to one pass rate: every recipe's runs, mean and 90 % interval",
    "curves.png": "The validation pass rate of every recipe's runs, over its reference's curves",
}


class Results:
    """Writes the results of a study; fits of finished runs are kept."""

    def __init__(
        self,
        study: StudyFolder,
        references: Sequence[str],
        *,
        pass_rate: float | None = None,
        per_step: bool = False,
        same: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """references, pass_rate: as in `fit.compare.compare_runs`. per_step: steps are the compute.

        same: recipe without runs of its own -> the one that it is the same as.
        """
        self._study, self._references, self._pass_rate = study, references, pass_rate
        self._left_out = frozenset(same)
        self._same = [f"{name} is the same recipe as {other} here." for name, other in same.items()]
        self._columns = ColumnOptions(compute="step" if per_step else None)
        self._fits: dict[str, FitResult] = {}

    def write(self, *, planned: int) -> Comparison | None:
        """Compare the finished runs and write all files; None if there are fewer than two, and only the page then.

        planned: runs of the whole study. Raises ValueError for runs that cannot be compared, OSError.
        """
        curves, notes = self._curves()
        notes = [f"{len(curves)} of {planned} runs are finished and compared.", *self._same, *notes]
        title = f"Study {self._study.path.resolve().name}"
        comparison = None if len(curves) < 2 else self._compared(curves)
        with tempfile.TemporaryDirectory(prefix=".results-", dir=self._study.path) as scratch:
            figures = []
            if comparison is not None:
                for name, draw in zip(FIGURES, (plot_comparison, plot_curves)):
                    figures.append((draw(Path(scratch) / name, comparison), FIGURES[name]))
            page = html_page(title, notes, comparison=comparison, comparison_figures=figures)
            for figure, _ in figures:
                sync(figure)
                figure.replace(self._study.path / figure.name)
        for name, text in self._texts(comparison, title, notes).items():
            write_durably(self._study.path / name, text.encode())
        write_durably(self._study.path / PAGE, page.encode())
        return comparison

    def _texts(self, comparison: Comparison | None, title: str, notes: Sequence[str]) -> dict[str, str]:
        if comparison is None:
            return {}
        table = comparison_table(comparison)
        lines = [*conclusions(comparison), *(summary(comparison, arm) for arm in comparison.arms)]
        words = "".join(f"- {line}\n" for line in lines)
        pictures = "".join(f"\n![{text}]({name})\n" for name, text in FIGURES.items())
        return {
            TABLE: f"# {title}\n\n{' '.join(notes)}\n\n{table.markdown()}\n{words}{pictures}",
            JSON: json.dumps(comparison_json(comparison), indent=1, allow_nan=False) + "\n",
        }

    def _curves(self) -> tuple[list[Curve], list[str]]:
        """The finished runs, and a line on those that failed, cannot be read or have too few validations."""
        curves, notes, arms = [], [], self._study.arms()
        for name in sorted(self._study.finished() & set(self._study.known())):
            if arms[name] in self._left_out:  # it may have run before its recipe became that of another arm
                continue
            try:
                [curve] = read_curves(self._study.path / "runs" / name, self._columns)
                if name not in self._fits:
                    self._fits[name] = fit_curve(curve)
            except (ValueError, ArithmeticError, RuntimeError, OSError) as error:
                notes.append(f"Left out: {' '.join(str(error).split())}.")
            else:
                curves.append(replace(curve, arm=arms[name]))
        failures = sorted(self._study.failures().items())
        notes += [f"Failed: {name} (exit code {code}), log: logs/{name}.log." for name, code in failures]
        return curves, notes

    def _compared(self, curves: Sequence[Curve]) -> Comparison:
        arms = {curve.arm for curve in curves}
        known = [text for text in self._references if {*text.split("=")} <= arms]

        def fitted(curve: Curve, asymptote: float | None) -> FitResult:
            return self._fits[curve.name] if asymptote is None else fit_curve(curve, fixed_asymptote=asymptote)

        return compare_runs(curves, fitted, references=known, pass_rate=self._pass_rate)

"""The runs that the prior is learned from and the methods are compared on: published and tiny ones in one form."""

import csv
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from published import CURVES, GENERATIONS, PROMPTS, published_series

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.forecast import fit_curve
from megatron_scalerl.fit.prior import DEFAULT_PRIOR

Mask = NDArray[np.bool_]
PUBLISHED, TINY, FOREIGN = "published", "tiny", "foreign"
MIN_POINTS = 3
"""Fitted points below which nothing is forecast."""
BLOCK = 3
"""Rows of curves/tiny/table.csv in one block: variants of one regime. The last of each is held back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownRun:
    """One run as one figure or file shows it."""

    world: str
    """`PUBLISHED`, `TINY` or `FOREIGN`."""
    run: str
    """The physical run: several figures can show one. It is left out as a whole."""
    setting: str
    """Task, policy and warm start: runs that share it differ in their recipe alone."""
    curve: Curve = field(repr=False)
    """All points. The name is figure/series, or that of the tiny run."""
    own: Mask = field(repr=False)
    """[n] the points that the authors fitted; of a tiny run all."""
    halved: float
    """Compute at half of the run: of its steps where these are known."""

    @property
    def reach(self):
        """Compute up to which the authors fitted; of a tiny run all of it."""
        return float(self.curve.compute[self.own].max())


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A forecast of a run from its first part."""

    known: KnownRun
    """The run."""
    part: str
    """"authors" (what they fitted), "half", "third" or "quarter"."""
    fitted: Mask = field(repr=False)
    """[n] the points to fit."""
    unseen: Mask = field(repr=False)
    """[n] the points to forecast."""

    def fit(self, *, method="robust", prior=DEFAULT_PRIOR, draws=2000):
        """The fit of the first part."""
        return fit_curve(self.known.curve.part(self.fitted), method=method, prior=prior, draws=draws)

    def evaluate(self, result):
        """A fit of the first part compared with the rest."""
        rest = self.known.curve.part(self.unseen)
        return result.evaluate(rest.compute, rest.pass_rate, completions=rest.completions)


@cache
def known_runs(*, held_back=False):
    """Published runs and tiny ones to learn from; with `held_back` the tiny ones that nothing is learned from."""
    tiny = tuple(tiny_runs(CURVES / "tiny", held_back=held_back))
    return tiny if held_back else (*map(_of_published, published_series()), *tiny)


def tiny_runs(folder, *, held_back):
    """The runs of table.csv that have been made, in its order: those that are held back, or the others."""
    with open(folder / "table.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [row for number, row in enumerate(rows) if (number % BLOCK == BLOCK - 1) == held_back]
    files = [(row, folder / f"{row['name']}.json") for row in chosen]
    return [_of_tiny(row, json.loads(file.read_text(encoding="utf-8"))) for row, file in files if file.exists()]


def others(folder):
    """Curves of other people, none of which ships with this project: validations, and means of training batches.

    folder: has sources.csv (name, kind, repo, prompts, generations) and data/NAME.csv (step, score, and compute where
    it is known). Repeated curves and such without a pass rate in [0, 1] are left out. A validation at compute 0 is
    R_0; a training batch at step 0 is the first point.
    """
    runs = []
    with open(folder / "sources.csv", newline="") as file:
        sources = [row for row in csv.DictReader(file) if not row["duplicate_of_another"]]
    for row in sources:
        with open(folder / "data" / f"{row['name']}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        points = np.array([[float(r.get("compute") or r["step"]), float(r["score"])] for r in rows if r["score"]])
        points = points[np.argsort(points[:, 0], kind="stable")]
        if points[:, 1].min() < 0.0 or points[:, 1].max() > 1.0:
            continue
        training = row["kind"] != "val"
        if training and points[0, 0] == 0.0:
            points[:, 0] += 1.0
        first = points[points[:, 0] <= 0, 1]
        compute, pass_rate = points[points[:, 0] > 0].T
        stated = row["prompts"] and row["generations"]
        curve = _curve(
            row["name"],
            compute,
            pass_rate,
            initial=float(first[0]) if len(first) else None,
            prompts=int(row["prompts"]) if stated else None,
            generations=np.full(len(compute), float(row["generations"])) if stated else None,
        )
        runs.append(
            KnownRun(
                world=FOREIGN,
                run=row["name"],
                setting=row["repo"] + (", training batches" if training else ""),
                curve=curve,
                own=np.ones(len(compute), dtype=bool),
                halved=float(compute.max()) / 2,
            )
        )
    return tuple(runs)


def by_run(runs):
    """Physical run -> its curves."""
    out = {}
    for known in runs:
        out.setdefault(known.run, []).append(known)
    return out


def tasks(runs, part):
    """The forecasts of one part: "authors", "half", "third" or "quarter"; none of a run that it leaves too short."""
    out = []
    for known in runs:
        c = known.curve.compute
        if part == "authors":
            fitted, within = known.own, np.ones(len(c), dtype=bool)
        else:
            until = known.halved if part == "half" else known.reach * {"third": 1 / 3, "quarter": 1 / 4}[part]
            fitted, within = known.own & (c <= until), known.own
        unseen = within & ~fitted
        if unseen.any() and np.count_nonzero(fitted) >= MIN_POINTS:
            out.append(Task(known=known, part=part, fitted=fitted, unseen=unseen))
    return out


def _of_published(series):
    curve = _curve(
        series.name,
        series.compute,
        series.pass_rate,
        initial=series.initial,
        prompts=PROMPTS,
        generations=np.full(len(series.compute), float(GENERATIONS)),
    )
    return KnownRun(
        world=PUBLISHED,
        run=series.run,
        setting=PUBLISHED,
        curve=curve,
        own=series.fitted,
        halved=float(series.compute[series.fitted].max()) / 2,
    )


def _of_tiny(row, recorded):
    points = {name: np.array(column) for name, column in recorded["validations"].items()}
    within = points["within_variance"].astype(float)
    curve = _curve(
        row["name"],
        points["compute"][1:],
        points["pass_rate"][1:],
        initial=float(points["pass_rate"][0]),
        prompts=recorded["prompts"],
        generations=points["generations"][1:].astype(float),
        initial_generations=int(points["generations"][0]),
        within_variance=within[1:],
        initial_within_variance=float(within[0]),
        unit="tflops",
    )
    until = points["compute"][points["step"] <= points["step"][-1] / 2].max()
    every = np.ones(len(curve.compute), dtype=bool)
    setting = " ".join(row[key] for key in ("kind", "levels", "flaw", "size", "task_seed", "sft_steps"))
    return KnownRun(world=TINY, run=row["name"], setting=setting, curve=curve, own=every, halved=float(until))


def _curve(name, compute, pass_rate, **fields):
    return Curve(name=name, source=Path(name), compute=compute, pass_rate=pass_rate, **fields)

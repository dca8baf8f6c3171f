"""The summary of an evaluation: rates with intervals, budgets compared, as JSON and as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from megatron_scalerl.evaluation.budgets import MARGIN, Saturation, saturation
from megatron_scalerl.evaluation.contamination import Contamination
from megatron_scalerl.evaluation.estimators import Estimate, default_ks, mean_at_k, pass_at_k, rate_over_prompts
from megatron_scalerl.evaluation.problems import ProblemFile
from megatron_scalerl.evaluation.results import Cell
from megatron_scalerl.fit.tables import Table
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.record import record


@record
class FileSummary:
    """One file at one budget. Produced by `summarize`."""

    file: str
    budget: int | None
    problems: int
    k: int
    mean_at_k: Estimate
    pass_at_k: dict[int, Estimate]
    """k -> pass@k"""
    mean_tokens: float
    """Mean length of a completion (tokens)."""
    truncated_share: float
    interrupted_share: float
    lost: int
    """Completions that are in no rate."""
    labels: dict[str, dict[str, Estimate]]
    """MATH-500: label -> its value -> mean@k of the problems that have it."""
    clean: Estimate | None = None
    """mean@k of the problems that no training prompt hits, where both were compared and some are left."""


def summarize(cell: Cell, file: ProblemFile, contaminated: Contamination | None, *, k: int) -> FileSummary:
    """The summary of the completions of one file. contaminated: where it was compared with training prompts."""
    counts = cell.counts
    rows = [row for of_problem in cell.rows for row in of_problem]
    rates = counts.rates()

    def part(chosen: list[int]) -> Estimate:
        return rate_over_prompts(rates[chosen], observations=sum(counts.completions[i] for i in chosen))

    labels: dict[str, dict[str, list[int]]] = {}
    for number, problem in enumerate(file.problems):
        for name, value in problem.labels.items():
            labels.setdefault(name, {}).setdefault(value, []).append(number)
    hit = contaminated.problems_hit if contaminated else {problem.where for problem in file.problems}
    clean = [number for number, problem in enumerate(file.problems) if problem.where not in hit]
    return FileSummary(
        file=cell.file,
        budget=cell.budget,
        problems=len(file.problems),
        k=k,
        mean_at_k=mean_at_k(counts),
        pass_at_k={n: pass_at_k(counts, n) for n in default_ks(counts.completions)},
        mean_tokens=fmean(row.tokens for row in rows),
        truncated_share=fmean(row.truncated for row in rows),
        interrupted_share=fmean(row.interrupted for row in rows),
        lost=cell.lost,
        labels={name: {value: part(of) for value, of in sorted(found.items())} for name, found in labels.items()},
        clean=part(clean) if clean else None,
    )


def summaries_of(
    cells: Sequence[Cell], files: Sequence[ProblemFile], contaminations: Mapping[str, Contamination], *, k: int
) -> list[FileSummary]:
    """The summary of each cell. contaminations: of the files that were compared with training prompts."""
    by_name = {file.name: file for file in files}
    return [summarize(cell, by_name[cell.file], contaminations.get(cell.file), k=k) for cell in cells]


def compare_budgets(cells: Sequence[Cell], *, margin: float = MARGIN) -> Saturation | None:
    """Where more thinking stops paying, of the cells of one file; None for fewer than two budgets."""
    import numpy as np

    ordered = sorted((cell for cell in cells if cell.budget is not None), key=lambda cell: cell.budget or 0)
    if len(ordered) < 2:
        return None
    rates = np.stack([cell.counts.rates() for cell in ordered], axis=1)
    return saturation([cell.budget or 0 for cell in ordered], rates, margin=margin)


def as_json(
    summaries: Sequence[FileSummary],
    saturations: Mapping[str, Saturation],
    contaminations: Mapping[str, Contamination],
    *,
    header: Any,
) -> dict[str, Any]:
    """The content of summary.json."""
    return {
        "evaluation": header,
        "interval": "95 %, over prompts (Korn and Graubard 1998)",
        "files": [asdict(summary) for summary in summaries],
        "budgets": {file: asdict(found) for file, found in saturations.items()},
        "contamination": {
            file: {
                "n": found.n,
                "training_prompts": found.training,
                "training_prompts_hit": found.training_hit,
                "problems": found.problems,
                "problems_hit": len(found.problems_hit),
                "all_hits": found.all_hits,
                "hits": found.rows(),
            }
            for file, found in contaminations.items()
        },
    }


def scores_table(summaries: Sequence[FileSummary]) -> Table:
    """One row for each budget of one file."""
    k = max(summaries[0].pass_at_k)
    rows = []
    for s in summaries:
        mean, some = s.mean_at_k, s.pass_at_k.get(k)
        budget = "recipe" if s.budget is None else f"{s.budget:,}"
        row = [budget, str(s.problems), f"{mean.value:.3f}", f"{mean.low:.3f}-{mean.high:.3f}"]
        row += [] if k == 1 else ["" if some is None else f"{some.value:.3f}"]
        row += [f"{s.mean_tokens:,.1f}", f"{s.interrupted_share:.3f}", f"{s.truncated_share:.3f}", str(s.lost)]
        rows.append(tuple(row))
    scores = (f"mean@{summaries[0].k}", "95 %", *([] if k == 1 else [f"pass@{k}"]))
    return Table(
        columns=("budget", "problems", *scores, "tokens", "interr", "trunc", "lost"),
        rows=tuple(rows),
        title=printable(summaries[0].file),
        labeled=False,
    )


def labels_table(summary: FileSummary) -> Table:
    """mean@k by subject and level."""
    rows = [
        (f"{name} {printable(value)}", str(found.prompts), str(found))
        for name, values in summary.labels.items()
        for value, found in values.items()
    ]
    return Table(columns=(printable(summary.file), "problems", f"mean@{summary.k}"), rows=tuple(rows))


def gains_table(found: Saturation) -> Table:
    """Each budget against the larger ones."""
    return Table(
        columns=("budget", "largest gain of a larger one", "95 % upper bound", "shown above 0"),
        rows=tuple(
            (f"{step.budget:,}", f"{step.largest_gain:+.3f}", f"{step.upper:+.3f}", "yes" if step.shown else "no")
            for step in found.steps[:-1]
        ),
        labeled=False,
    )

"""The summary of an evaluation, as JSON and as tables: rates with intervals, and a comparison of budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import fmean
from typing import Any

from megatron_scalerl.evaluation.budgets import MARGIN, Saturation, saturation
from megatron_scalerl.evaluation.contamination import Contamination
from megatron_scalerl.evaluation.estimators import (
    Estimate,
    default_ks,
    mean_at_k,
    pass_at_k,
    rate_over_prompts,
    rates,
)
from megatron_scalerl.evaluation.problems import ProblemFile
from megatron_scalerl.evaluation.results import Cell
from megatron_scalerl.fit.tables import Table
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.record import record


@record
class FileSummary:
    """The scores of a file at a budget. Produced by `summarize`."""

    file: str
    budget: int | None
    problems: int
    k: int
    mean_at_k: Estimate
    pass_at_k: dict[int, Estimate]
    """k -> estimate of pass@k."""
    mean_tokens: float
    """Mean length of a completion (tokens)."""
    truncated_share: float
    interrupted_share: float
    lost: int
    """Number of lost completions, which count in no rate."""
    labels: dict[str, dict[str, Estimate]]
    """MATH-500: label -> value -> mean@k of the problems with this value."""
    clean: Estimate | None = None
    """mean@k of the problems that no training prompt hits; None without such a problem or without a comparison."""


def summarize(cell: Cell, file: ProblemFile, contaminated: Contamination | None, *, k: int) -> FileSummary:
    """The scores of the completions in `cell`, which are of problems in `file`. contaminated: the problems' hits by
    training prompts, if training prompts were compared. k: requested completions of each problem."""
    outcomes = cell.outcomes
    rows = list(chain(*cell.rows))
    shares = rates(outcomes)

    def mean_of(numbers: list[int]) -> Estimate:
        return rate_over_prompts(shares[numbers], observations=sum(len(outcomes[i]) for i in numbers))

    # Here problems are numbered from 0, to index `shares`.
    numbers_of: dict[str, dict[str, list[int]]] = {}
    for number, problem in enumerate(file.problems):
        for name, value in problem.labels.items():
            numbers_of.setdefault(name, {}).setdefault(value, []).append(number)
    labels = {
        name: {value: mean_of(numbers) for value, numbers in sorted(values.items())}
        for name, values in numbers_of.items()
    }
    clean = None
    if contaminated:
        hit = contaminated.problems_hit
        numbers = [number for number, problem in enumerate(file.problems) if problem.where not in hit]
        if numbers:
            clean = mean_of(numbers)
    return FileSummary(
        file=cell.file,
        budget=cell.budget,
        problems=len(file.problems),
        k=k,
        mean_at_k=mean_at_k(outcomes),
        pass_at_k={n: pass_at_k(outcomes, n) for n in default_ks(outcomes)},
        mean_tokens=fmean(row.tokens for row in rows),
        truncated_share=fmean(row.truncated for row in rows),
        interrupted_share=fmean(row.interrupted for row in rows),
        lost=cell.lost,
        labels=labels,
        clean=clean,
    )


def summaries_of(
    cells: Sequence[Cell], files: Sequence[ProblemFile], contaminations: Mapping[str, Contamination], *, k: int
) -> list[FileSummary]:
    """The summary of each cell. contaminations: file name -> hits by training prompts; empty without a comparison.
    k: requested completions of each problem."""
    by_name = {file.name: file for file in files}
    return [summarize(cell, by_name[cell.file], contaminations.get(cell.file), k=k) for cell in cells]


def compare_budgets(cells: Sequence[Cell], *, margin: float = MARGIN) -> Saturation | None:
    """The budget at which more thinking stops paying, from a file's cells; None for fewer than two budgets."""
    import numpy as np

    by_budget = {cell.budget: rates(cell.outcomes) for cell in cells if cell.budget is not None}
    if len(by_budget) < 2:
        return None
    budgets = sorted(by_budget)
    return saturation(budgets, np.stack([by_budget[budget] for budget in budgets], axis=1), margin=margin)


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
        "budgets": {file: asdict(saturation) for file, saturation in saturations.items()},
        "contamination": {
            file: {
                "n": contamination.n,
                "training_prompts": contamination.training,
                "training_prompts_hit": contamination.training_hit,
                "problems": contamination.problems,
                "problems_hit": len(contamination.problems_hit),
                "all_hits": contamination.all_hits,
                "hits": contamination.rows(),
            }
            for file, contamination in contaminations.items()
        },
    }


def scores_table(summaries: Sequence[FileSummary]) -> Table:
    """The scores of a file, a row for each budget."""
    k = max(summaries[0].pass_at_k)
    columns = ["budget", "problems", f"mean@{summaries[0].k}", "95 %"]
    if k > 1:
        columns.append(f"pass@{k}")
    columns += ["tokens", "interr", "trunc", "lost"]
    rows = []
    for summary in summaries:
        budget = "recipe"
        if summary.budget is not None:
            budget = f"{summary.budget:,}"
        mean = summary.mean_at_k
        row = [budget, str(summary.problems), f"{mean.value:.3f}", f"{mean.low:.3f}-{mean.high:.3f}"]
        if k in summary.pass_at_k and k > 1:
            row.append(f"{summary.pass_at_k[k].value:.3f}")
        elif k > 1:
            # At this budget a problem has fewer than k completions, because completions were lost.
            row.append("")
        row.append(f"{summary.mean_tokens:,.1f}")
        row += [f"{share:.3f}" for share in (summary.interrupted_share, summary.truncated_share)]
        row.append(str(summary.lost))
        rows.append(tuple(row))
    return Table(columns=tuple(columns), rows=tuple(rows), title=printable(summaries[0].file), labels=0)


def labels_table(summary: FileSummary) -> Table:
    """The scores of a file by subject and level."""
    rows = [
        (f"{name} {printable(value)}", str(estimate.prompts), str(estimate))
        for name, values in summary.labels.items()
        for value, estimate in values.items()
    ]
    return Table(columns=(printable(summary.file), "problems", f"mean@{summary.k}"), rows=tuple(rows))


def gains_table(saturation: Saturation) -> Table:
    """The comparisons of budgets: a row for each budget except the largest."""
    words = {True: "yes", False: "no"}
    rows = [
        (f"{step.budget:,}", f"{step.largest_gain:+.3f}", f"{step.upper:+.3f}", words[step.shown])
        for step in saturation.steps[:-1]
    ]
    columns = ("budget", "largest gain of a larger budget", "95 % upper bound", "shown above 0")
    return Table(columns=columns, rows=tuple(rows), labels=0)

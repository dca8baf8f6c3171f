"""`megatron-scalerl evaluate FOLDER --data FILE`: mean@k and pass@k of an exported policy, and thinking budgets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.evaluation.inputs import EvaluationInputs
    from megatron_scalerl.evaluation.results import ResultFile

EPILOG = """examples:
  megatron-scalerl export runs/my_run --out models/trained
  megatron-scalerl evaluate models/trained --recipe runs/my_run/recipe.yaml --data aime24.jsonl --k 16 --out scores
  megatron-scalerl evaluate models/trained --recipe runs/my_run/recipe.yaml --data math500.jsonl:math500 --k 4
    --budgets 256,512,1024,2048,4096,8192,16384,32768 --out sweep

schemas of evaluation files (.jsonl, .parquet), found from the columns if none is given:
  aime            Problem, Answer, ID; problem, answer, id; question, answer: integers from 0 to 999
  math500         problem, answer, unique_id, subject, level
  PROBLEM,ANSWER  any two columns, as in data.jsonl:question,solution

The recipe decides prompts, interruption, temperature, verifier and engines, as in training; without --recipe the
defaults apply. An evaluation that was stopped goes on with the same command; OUT/completions.jsonl has every
completion, OUT/summary.json the scores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Score a Hugging Face folder on evaluation files, at one or several thinking budgets."
    parser.epilog = EPILOG
    parser.add_argument(
        "folder", metavar="FOLDER", help="Hugging Face folder of the policy, for example written by `export`"
    )
    parser.add_argument(
        "--data", action="append", required=True, metavar="FILE[:SCHEMA]", help="evaluation file; may be repeated"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for the result")
    parser.add_argument("--k", type=int, default=16, metavar="K", help="completions of each problem (default: 16)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of sampling (default: 1)")
    parser.add_argument(
        "--budgets",
        metavar="N,N,...",
        help="thinking budgets (tokens): thinking is interrupted after N tokens (default: as in the recipe)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=0.01,
        metavar="X",
        help="least gain in pass rate (0 to 1) for which a larger budget pays (default: 0.01)",
    )
    parser.add_argument("--recipe", metavar="FILE", help="recipe of the training run, for example RUN/recipe.yaml")
    parser.add_argument(
        "--training",
        action="append",
        default=[],
        metavar="TRAINING",
        help="training prompts that are compared with the problems: a FILE with a column called prompt, or "
        "FILE:COLUMN; may be repeated",
    )
    parser.add_argument(
        "--examples", type=int, default=0, metavar="N", help="print N completions of each file (default: 0)"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="settings that override the recipe's"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Evaluate the policy. Raises ValueError for wrong options or files, RuntimeError and OSError for failed
    processes."""
    from rich.progress import Progress

    from megatron_scalerl.evaluation.inputs import check_evaluation, policy_digest
    from megatron_scalerl.evaluation.offline import VERSION, generate
    from megatron_scalerl.evaluation.problems import read_problems, split_schema
    from megatron_scalerl.evaluation.results import ResultFile
    from megatron_scalerl.launch.hosts import allow_open_files
    from megatron_scalerl.processes.signals import run_until_signal
    from megatron_scalerl.recipe.file import load_recipe_for
    from megatron_scalerl.recipe.hub import local_path

    k = arguments.k
    budgets = _budgets(arguments.budgets)
    for option, value, minimum in (
        ("--k", k, 1),
        ("--seed", arguments.seed, 0),
        ("--examples", arguments.examples, 0),
    ):
        if value < minimum:
            raise ValueError(f"{option}: {value} is too small; take at least {minimum}")
    files = [read_problems(*split_schema(text)) for text in arguments.data]
    arguments.folder = local_path(arguments.folder, "model")
    recipe = load_recipe_for(arguments.folder, arguments.recipe, arguments.overrides, prompts=files[0].path)
    evaluated = check_evaluation(recipe, files, budgets)
    contaminations = _contaminations(arguments.training, evaluated)
    allow_open_files(evaluated.recipe)
    digest = policy_digest(arguments.folder)
    # The header is made before the engines start: a folder with another evaluation is refused at once.
    header = evaluated.header(policy=arguments.folder, digest=digest, version=VERSION, seed=arguments.seed, k=k)
    with ResultFile(arguments.out, header) as result:
        keys = evaluated.keys(k)
        missing_count = len(result.missing(keys))
        if missing_count < len(keys):
            console.print(f"{len(keys) - missing_count} of {len(keys)} completions are in the folder already")
        if missing_count:
            console.print("starting the engines")

        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("completions", total=len(keys), completed=len(keys) - missing_count)
            work = generate(
                evaluated,
                result,
                k=k,
                seed=arguments.seed,
                ready=lambda: console.print(f"generating {missing_count} completions"),
                finished=lambda: bar.advance(task),
            )
            run_until_signal(work, None, lambda: f"goes on with the completions in {arguments.out}")
        _report(arguments, evaluated, result, contaminations, header, console)
    return 0


def _budgets(text: str | None) -> list[int]:
    if text is None:
        return []
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ValueError(f"--budgets: {text!r} is not a list of numbers of tokens such as 256,512,1024")
    budgets = [int(word) for word in words]
    if any(a >= b for a, b in pairwise(budgets)):
        raise ValueError(f"--budgets: {text!r} does not ascend; name each budget once, the smallest first")
    return budgets


def _contaminations(sources: Sequence[str], evaluated: EvaluationInputs) -> dict[str, Any]:
    """File name -> contamination of the file by all training prompts; empty without training prompts."""
    from megatron_scalerl.evaluation.contamination import contamination, training_texts

    if not sources:
        return {}
    training = list(training_texts(sources))
    return {file.name: contamination(training, file.problems) for file in evaluated.files}


def _report(
    arguments: argparse.Namespace,
    evaluated: EvaluationInputs,
    result: ResultFile,
    contaminations: dict[str, Any],
    header: Any,
    console: Console,
) -> None:
    """Compute, print and write the summary."""
    from megatron_scalerl.evaluation.results import cells
    from megatron_scalerl.evaluation.summaries import (
        as_json,
        compare_budgets,
        gains_table,
        labels_table,
        scores_table,
        summaries_of,
    )
    from megatron_scalerl.processes.logs import printable

    all_cells = cells(result.rows.values(), evaluated.keys(arguments.k))
    all_cells.sort(key=lambda cell: cell.budget or 0)
    summaries = summaries_of(all_cells, evaluated.files, contaminations, k=arguments.k)
    names = [file.name for file in evaluated.files]
    for name in names:
        summaries_of_file = [summary for summary in summaries if summary.file == name]
        console.print(scores_table(summaries_of_file))
        last = summaries_of_file[-1]
        if last.labels:
            console.print(labels_table(last))
        if last.clean is not None and contaminations[name].problems_hit:
            score = f"mean@{last.k}"
            if last.budget is not None:
                score += f" at a budget of {last.budget:,}"
            console.print(f"{score} of the {last.clean.prompts} uncontaminated problems: {last.clean}")
    for name, contaminated in contaminations.items():
        console.print(f"{printable(name)}: {contaminated.line()}")
    saturations = {}
    for name in names:
        saturation = compare_budgets([cell for cell in all_cells if cell.file == name], margin=arguments.margin)
        if saturation is not None:
            saturations[name] = saturation
            console.print(gains_table(saturation))
            console.print(f"{printable(name)}: {saturation.line()}")
    _print_examples(arguments.examples, evaluated, result, console)
    path = result.finish(as_json(summaries, saturations, contaminations, header=header))
    console.print(f"summary: {path}")


def _print_examples(count: int, evaluated: EvaluationInputs, result: ResultFile, console: Console) -> None:
    """Print `count` completions of each file. Markup in the policy's text is printed, not interpreted."""
    from rich.text import Text

    from megatron_scalerl.processes.logs import printable

    for file in evaluated.files:
        rows = [row for row in result.rows.values() if row.key.file == file.name and not row.lost]
        rows.sort(key=lambda row: (row.key.index, row.key.number, row.key.budget or 0))
        for row in rows[:count]:
            problem = file.problems[row.key.number - 1]
            verdict = {True: "right", False: "wrong"}[row.correct]
            if row.reason and not row.correct:
                verdict += f" ({row.reason})"
            completion = f"completion {row.key.index}"
            if row.key.budget is not None:
                completion += f", budget {row.key.budget:,}"
            heading = f"{file.name}, problem {problem.problem_id}, {completion}, {row.tokens} tokens, {verdict}"
            console.print(Text(printable(f"{heading}, reference {problem.answer}"), style="bold"))
            console.print(Text(printable(problem.text), style="dim"))
            console.print(Text(printable(row.text)))

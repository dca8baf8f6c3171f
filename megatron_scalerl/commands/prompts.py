"""`megatron-scalerl prompts RECIPE`: look at the prompts of a recipe before any process is started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_scalerl.commands.contamination import shortened
from megatron_scalerl.commands.train import add_recipe, recipe_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.recipe.tasks import Task
    from megatron_scalerl.types import Prompt

EPILOG = """example:
  megatron-scalerl prompts my_run.yaml

A bar stands between two tokens; special tokens are bold, and tokens without a loss are in brackets. `train` makes the
same checks."""
WRONG = "\\boxed{-918273645}"
"""An answer that no problem has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Show prompts of a recipe as the policy gets them, rows that are skipped, and scores."
    parser.epilog = EPILOG
    parser.add_argument(
        "--count", type=int, default=3, metavar="N", help="prompts of each task (default: %(default)s)"
    )
    add_recipe(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print and return 0. Raises ValueError for user errors."""
    from megatron_scalerl.recipe.file import check_prompts

    recipe = recipe_of(arguments)
    check_prompts(recipe)
    from megatron_scalerl.controller.preflight import checked_prompts  # imports transformers
    from megatron_scalerl.plan.settings import check_settings
    from megatron_scalerl.processes.logs import printable
    from megatron_scalerl.prompts.end_tokens import end_token_ids
    from megatron_scalerl.recipe.tasks import tasks_of
    from megatron_scalerl.rollouts.plans import forced_ids

    settings = check_settings(recipe)
    recipe = settings.recipe
    tokenizer = settings.tokenizer
    prompts = checked_prompts(recipe, tokenizer)
    phrase_ids, _ = forced_ids(recipe, tokenizer)
    for line in [f"prompts: {settings.chat.why}", *prompts.report.lines()]:
        console.print(printable(line), highlight=False)
    for task in tasks_of(recipe):
        _show_task(task, [prompt for prompt in prompts.training if prompt.task == task.name], arguments.count,
                   tokenizer, console)  # fmt: skip
    low, high = recipe.interruption.thinking_tokens
    if recipe.interruption.enabled:
        _show(f"forced after {low} to {high} tokens of thinking", _tokens(tokenizer, phrase_ids), console)
    ends = end_token_ids(recipe.policy.path, tokenizer)
    _show("tokens that end a completion", _tokens(tokenizer, ends), console)
    if recipe.sft.path is not None and Path(recipe.sft.path).exists():
        _show_warm_start(recipe, tokenizer, console)
    return 0


def _show_task(task: Task, prompts: Sequence[Prompt], count: int, tokenizer: Any, console: Console) -> None:
    """The lengths of a task's prompts, and the first `count` with their scores."""
    from megatron_scalerl.rewards.pool import limits_of
    from megatron_scalerl.rewards.worker import load_verifier

    lengths = [len(prompt.token_ids) for prompt in prompts]
    console.print(
        f"{task.key}: {min(lengths)} to {max(lengths)} tokens, median {median(lengths):g}, at most "
        f"{task.prompts.max_prompt_tokens} allowed",
        highlight=False,
    )
    verify = load_verifier(task.rewards.verifier, limits_of(task.rewards))
    for prompt in prompts[:count]:
        _show(
            f"prompt {prompt.prompt_id}, {len(prompt.token_ids)} tokens",
            _tokens(tokenizer, prompt.token_ids),
            console,
        )
        console.print(f"reference: {shortened(prompt.answer)}", highlight=False)
        states = any(mark in prompt.answer for mark in ("\\boxed", "####"))
        itself = prompt.answer if states else f"\\boxed{{{prompt.answer}}}"
        answers = {"a wrong answer": WRONG}
        if task.rewards.verifier != "code":  # its reference is unit tests, not a program
            answers = {"the reference itself": itself, **answers}
        for name, text in answers.items():
            score = verify(text, prompt.answer, dict(prompt.extra))
            verdict = {True: "right", False: "wrong"}.get(score, score)
            console.print(f"  {name}, {shortened(text)}: {verdict}", highlight=False)


def _show_warm_start(recipe: Recipe, tokenizer: Any, console: Console) -> None:
    """The first example of the warm start with forced tokens, else the first one."""
    from megatron_scalerl.prompts.sft_examples import read_examples

    examples = read_examples(recipe, tokenizer)
    for line in examples.lines():
        console.print(line, highlight=False)
    completions = [completion for _, completion in examples.samples]
    shown = next((each for each in completions if not all(each.loss_mask)), completions[0])
    masked = f"{shown.loss_mask.count(False)} of {len(shown.token_ids)} tokens without loss"
    title = f"warm start: {len(completions)} examples; a completion, {masked}"
    _show(title, _tokens(tokenizer, shown.token_ids, shown.loss_mask), console)


def _show(title: str, text: Text, console: Console) -> None:
    from rich.text import Text

    console.print(Text(f"\n{title}", style="bold"))
    console.print(text)


def _tokens(tokenizer: Any, ids: Sequence[int], loss_mask: Sequence[bool] = ()) -> Text:
    """Tokens as text, a bar between two."""
    from rich.text import Text

    from megatron_scalerl.processes.logs import printable

    special, shown = set(tokenizer.all_special_ids), Text()
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for number, token in enumerate(ids):
        piece = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        masked = bool(loss_mask) and not loss_mask[number]
        piece = printable(piece).replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
        shown.append("|" if number else "", style="dim")
        shown.append(f"[{piece}]" if masked else piece, style="bold" if token in special else "dim" if masked else "")
    return shown

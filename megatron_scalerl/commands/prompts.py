"""`megatron-scalerl prompts RECIPE`: look at the prompts of a recipe before any process is started."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_scalerl.commands.train import add_recipe, recipe_of
from megatron_scalerl.processes.logs import printable

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.recipe.tasks import Task
    from megatron_scalerl.types import Prompt

EPILOG = """examples:
  megatron-scalerl prompts my_run.yaml
  megatron-scalerl prompts my_run.yaml environment=calculator:Calculator --response 7+2= --response 9

A bar separates two tokens; special tokens are bold, and tokens without a loss are in brackets. `train` makes the same
checks."""
WRONG = "\\boxed{-918273645}"
"""A wrong answer to every problem, because no problem has this number as the reference."""
WIDTH = 200
"""Most characters of a text that are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Show the prompts of a recipe as the policy gets them, the rows that are skipped, and how the verifier "
        "scores a right and a wrong answer. With an environment, show an episode instead."
    )
    parser.epilog = EPILOG
    parser.add_argument(
        "--count", type=int, default=3, metavar="N", help="prompts to show of each task (default: %(default)s)"
    )
    parser.add_argument(
        "--response",
        action="append",
        metavar="TEXT",
        help="the policy's answer in a turn of the episode; repeat for further turns (default: the reference)",
    )
    add_recipe(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the prompts; returns 0. Raises ValueError for a wrong recipe or wrong prompts."""
    from megatron_scalerl.recipe.file import check_prompts

    recipe = recipe_of(arguments)
    check_prompts(recipe)
    from megatron_scalerl.controller.preflight import checked_prompts  # imports transformers, which takes seconds
    from megatron_scalerl.plan.settings import check_settings
    from megatron_scalerl.prompts.end_tokens import end_token_ids
    from megatron_scalerl.recipe.tasks import tasks_of
    from megatron_scalerl.rollouts.plans import forced_ids

    settings = check_settings(recipe)
    recipe = settings.recipe
    tokenizer = settings.tokenizer
    prompts = checked_prompts(recipe, tokenizer)
    phrase_ids, _ = forced_ids(recipe, tokenizer)
    for line in [f"prompts: {settings.chat.why}", *prompts.lines()]:
        console.print(printable(line))
    ends = end_token_ids(recipe.policy.path, tokenizer)
    number = recipe.validation.prompts or 0
    for task, report in zip(tasks_of(recipe), prompts.reports):
        prompts_of_task = [prompt for prompt in prompts.training if prompt.task == task.name]
        if recipe.validation.every_steps and report.held_out < number:
            console.print(f"{task.key}: validation.prompts is {number}, but {report.held_out} prompts are held out")
        if task.episodes:
            asyncio.run(_show_episode(task.recipe, prompts_of_task[0], arguments.response, tokenizer, console))
        else:
            _show_task(task, prompts_of_task, arguments.count, tokenizer, console)
    for shortest, longest in {r.interruption.thinking_tokens for r in recipe.by_task if r.interruption.enabled}:
        _show(f"forced after {shortest} to {longest} tokens of thinking", tokenizer, phrase_ids, console)
    _show("tokens that end a completion", tokenizer, ends, console)
    if recipe.sft.path is not None and Path(recipe.sft.path).exists():
        _show_warm_start(recipe, tokenizer, console)
    return 0


def _is_list(reference: str) -> bool:
    """Whether math-verify reads the reference as a list without brackets, so that an answer with the elements in any
    order is right."""
    from megatron_scalerl.rewards.math import last_box
    from megatron_scalerl.rewards.math_compare import read
    from megatron_scalerl.rewards.math_text import whole_answer

    text = whole_answer(last_box(reference) or reference.rpartition("####")[2])
    if "," not in text or text.lstrip("\\")[0] == "{":
        return False
    return any(part.__class__.__name__ == "FiniteSet" for part in read(text).whole)


def _show_task(task: Task, prompts: Sequence[Prompt], count: int, tokenizer: Any, console: Console) -> None:
    """Print the lengths of a task's prompts, and the first `count` prompts with scores."""
    from megatron_scalerl.rewards.pool import limits_of
    from megatron_scalerl.rewards.worker import is_judge, load_verifier, reward_of

    lengths = [len(prompt.token_ids) for prompt in prompts]
    console.print(
        f"{task.key}: {min(lengths)} to {max(lengths)} tokens, median {median(lengths):g}, at most "
        f"{task.prompts.max_prompt_tokens} allowed",
    )
    if task.rewards.verifier == "math" and (lists := sum(_is_list(prompt.answer) for prompt in prompts)):
        console.print(f"{task.key}: {lists} references are lists, right in any order; (1, 2) fixes the order")
    verify = load_verifier(task.rewards.verifier, limits_of(task.rewards))
    # all checks share one event loop, since a judge may keep a session
    runner = asyncio.Runner()
    for prompt in prompts[:count]:
        title = f"prompt {prompt.prompt_id}, {len(prompt.token_ids)} tokens"
        _show(title, tokenizer, prompt.token_ids, console)
        console.print(f"reference: {shortened(prompt.answer)}")
        reference = prompt.answer
        # no box is put around a worked solution, which marks the answer by \boxed or ####
        if not any(mark in reference for mark in ("\\boxed", "####")):
            reference = f"\\boxed{{{reference}}}"
        answers = {"the reference itself": reference, "a wrong answer": WRONG}
        if task.rewards.verifier == "code":  # the references of `code` are unit tests, which are no answer
            del answers["the reference itself"]
        for name, text in answers.items():
            score = verify(text, prompt.answer, {**prompt.extra, "prompt": prompt.text})
            if is_judge(verify):
                score = runner.run(score)
            reward = reward_of(score)
            verdict = ("wrong", "right")[reward] if isinstance(reward, bool) else str(reward)
            console.print(f"  {name}, {shortened(text)}: {verdict}")


def shortened(text: str) -> str:
    """The first WIDTH characters of a text in one line, control characters escaped."""
    line = printable(" ".join(text.split()))
    if len(line) > WIDTH:
        line = line[: WIDTH - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return line


async def _show_episode(
    recipe: Recipe,
    prompt: Prompt,
    responses: Sequence[str] | None,
    tokenizer: Any,
    console: Console,
) -> None:
    """Print an episode of the environment in which the policy gives `responses`. Raises EnvironmentFailed if the
    environment raises or stops."""
    from megatron_scalerl.environments.pool import EnvironmentPool
    from megatron_scalerl.environments.response import Response
    from megatron_scalerl.prompts.turns import PastTurn
    from megatron_scalerl.rollouts.decoder_pool import turn_settings, turns_of

    section = recipe.environment.model_copy(update={"workers": 1})
    turns: list[PastTurn] = []
    with tempfile.TemporaryDirectory() as logs:
        async with EnvironmentPool(section, logs=Path(logs)) as pool, pool.episode(prompt.row) as episode:
            if pool.agent:
                console.print("no episode is shown: environment.name is an agent, which needs a policy that answers")
                return
            renderer, calls = turns_of(tokenizer, turn_settings(recipe, tokenizer, pool.tools))
            messages = [await episode.reset()]
            _show(f"prompt {prompt.prompt_id}", tokenizer, renderer.first(messages[0]), console)
            for text in responses or [prompt.answer]:
                tag, ids = tokenizer([recipe.prompts.think_end, text], add_special_tokens=False)["input_ids"]
                _, tool_calls = calls(ids)
                turn = await episode.step(Response(text=text, tool_calls=tool_calls))
                console.print(f"\nresponse: {printable(text)}\n{turn}")
                if turn.done:
                    return
                turns.append(PastTurn(token_ids=(*tag, *ids), answer_start=len(tag)))
                messages.append(turn.messages)
                _show("the next turn begins with", tokenizer, renderer.next(messages, turns)[0], console)


def _show_warm_start(recipe: Recipe, tokenizer: Any, console: Console) -> None:
    """Print the warm start's first example with forced tokens; if no example has such tokens, the first example."""
    from megatron_scalerl.prompts.sft_examples import read_examples

    examples = read_examples(recipe, tokenizer)
    for line in examples.lines():
        console.print(line)
    completions = [completion for _, completion in examples.samples]
    sample = min(completions, key=lambda completion: all(completion.loss_mask))
    masked = f"{sample.loss_mask.count(False)} of {len(sample.token_ids)} tokens without loss"
    title = f"warm start: {len(completions)} examples; completion of an example, {masked}"
    _show(title, tokenizer, sample.token_ids, console, sample.loss_mask)


def _show(title: str, tokenizer: Any, ids: Sequence[int], console: Console, loss_mask: Sequence[bool] = ()) -> None:
    """Print the tokens as text, separated by bars."""
    from rich.text import Text

    console.print(Text(f"\n{title}", style="bold"))
    special = set(tokenizer.all_special_ids)
    special |= {token for token, added_token in tokenizer.added_tokens_decoder.items() if added_token.special}
    line = Text()
    for number, token in enumerate(ids):
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = printable(text).replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
        style = ""
        if loss_mask and not loss_mask[number]:
            text = f"[{text}]"
            style = "dim"
        if token in special:
            style = "bold"
        if number:
            line.append("|", style="dim")
        line.append(text, style=style)
    console.print(line)

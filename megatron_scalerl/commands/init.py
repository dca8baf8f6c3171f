"""`megatron-scalerl init`: write a recipe for a policy, a file of prompts and a number of GPUs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_scalerl.plan.command import GPU
from megatron_scalerl.plan.hardware import GPUS

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.plan.planner import RunPlan
    from megatron_scalerl.prompts.chat import Chat
    from megatron_scalerl.prompts.dataset import PromptSet
    from megatron_scalerl.recipe import Recipe

EPILOG = """examples:
  megatron-scalerl init --policy models/my_policy --data data/math.jsonl --gpus 8
  megatron-scalerl init --policy Qwen/Qwen3-8B --data data/dapo --gpus 8 prompts.split=train steps=400

Settings that are given are written as they are; the others are chosen, and the reason stands next to each."""

Choices = dict[str, tuple[Any, str]]
"""Key of the recipe, at most two names -> its value and the reason for it."""
STEPS = 200
"""Steps of the run."""
FIRST_STEPS = 20
"""Steps of a first look at the run."""
SHORTEST = 16
"""Shortest completion for which a policy has to have room (tokens)."""
CPU_LONGEST = 256
"""Longest completion if CPUs generate (tokens)."""
CPU_BATCH = 8
"""Prompts of a step, and completions of each, if CPUs generate."""
FEWEST_HELD_OUT = 4
"""Fewest prompts that are held out, if the file has enough."""
VALIDATED = 200
"""Most prompts of a validation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Write a recipe for a policy and a file of prompts, and say why each line is as it is."
    parser.epilog = EPILOG
    parser.add_argument("--policy", required=True, metavar="NAME", help="Hugging Face folder, or its name on the hub")
    parser.add_argument(
        "--data", required=True, metavar="FILE", help="file of prompts, for prompts.path (docs/prompts.md)"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs of trainer and engines; 0: CPUs (default: the GPUs of this machine)",
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default=GPU, help="model of the GPUs (default: %(default)s)")
    parser.add_argument("--out", default="my_run.yaml", metavar="FILE", help="recipe to write (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="settings that are written as given"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write the recipe, print its lines with reasons, and the next commands. Raises ValueError for user errors."""
    out = Path(arguments.out)
    if out.exists() and not arguments.force:
        raise ValueError(f"--out: {out} exists; name another file, or overwrite it with --force")
    from megatron_scalerl.launch.placement import visible_gpus
    from megatron_scalerl.plan.settings import check_settings

    gpus = arguments.gpus
    if gpus is None:
        gpus = len(visible_gpus())
    if gpus < 0:
        raise ValueError(f"--gpus: {gpus} is no number of GPUs; 0 stands for CPUs")
    choices = _choose(arguments, gpus)
    recipe = _recipe(choices)
    check_settings(recipe)
    devices = "CPUs"
    if gpus:
        devices = f"{gpus} x {GPUS[arguments.gpu].name}"
    out.write_text(f"# Written by `megatron-scalerl init` for {devices}.\n{_text(choices)}", encoding="utf8")
    for key, (value, why) in choices.items():
        console.print(f"{f'{key}: {_json(value)}':<44}  {why}".rstrip(), highlight=False)
    number = f"--gpus {recipe.devices} --gpu {arguments.gpu}"
    console.print(
        f"{out} is written for {devices}; next:\n  megatron-scalerl plan {out} {number} --check\n"
        f"  megatron-scalerl prompts {out}\n  megatron-scalerl train {out} steps={min(FIRST_STEPS, recipe.steps)}",
        highlight=False,
    )
    return 0


def _choose(arguments: argparse.Namespace, gpus: int) -> Choices:
    """The lines of the recipe. Raises ValueError for a policy, a file or GPUs that cannot be used."""
    from megatron_scalerl.models import family, read_hf_config
    from megatron_scalerl.plan.counting import count
    from megatron_scalerl.prompts.tokenizer import policy_tokenizer
    from megatron_scalerl.recipe.file import check_policy, check_prompts, parsed_override
    from megatron_scalerl.recipe.hub import local_recipe

    given = {key: (value, "as given") for key, value in map(parsed_override, arguments.overrides)}
    choices = {
        "name": (Path(arguments.out).stem, ""),
        "steps": (STEPS, f"a first run; {FIRST_STEPS} are a first look"),
        "policy.path": (arguments.policy, ""),
        "policy.dtype": ("bfloat16", "for GPUs"),
        "prompts.path": (arguments.data, ""),
    }
    if not gpus:
        choices["policy.dtype"] = ("float32", "for CPUs")
    recipe = _recipe(choices | given)
    recipe = local_recipe(recipe, download=recipe.download)
    check_policy(recipe)
    check_prompts(recipe)
    hf_config = read_hf_config(recipe.policy.path)
    policy = family(hf_config)
    tokenizer = policy_tokenizer(recipe, hf_config)
    about = f"family {policy.name}, {count(policy).total:,} parameters"
    choices["policy.path"] = (arguments.policy, about)
    verifiers = ["math", "code"]
    if "rewards.verifier" in given:
        verifiers = [recipe.rewards.verifier]
    recipe, chat, prompts = _read(recipe, tokenizer, verifiers)
    choices["prompts.path"] = (arguments.data, prompts.report.layouts[0].partition(": ")[2])
    positions = hf_config.get_text_config().max_position_embeddings
    # `given` comes last, so that the user's settings win.
    choices |= _of_prompts(recipe, chat, prompts, tokenizer, positions, gpus) | given
    if not gpus:
        return choices
    from megatron_scalerl.plan.choose import choose

    return choices | _of_layout(choose(_recipe(choices), Path(recipe.policy.path), gpus, GPUS[arguments.gpu])) | given


def _read(recipe: Recipe, tokenizer: Any, verifiers: Sequence[str]) -> tuple[Recipe, Chat, PromptSet]:
    """The settled recipe with the first verifier that can use the references, and all prompts for training.

    Raises ValueError if no verifier can use them, with the reason of each.
    """
    from megatron_scalerl.controller.preflight import check_answers
    from megatron_scalerl.prompts.chat import chat_of_recipe
    from megatron_scalerl.prompts.dataset import load_prompts
    from megatron_scalerl.recipe.tasks import tasks_of

    # All prompts for training and none too long: `_of_prompts` decides both when it knows the lengths.
    section = recipe.prompts.model_copy(update={"held_out": 0, "max_prompt_tokens": sys.maxsize})
    problems = []
    for verifier in verifiers:
        rewards = recipe.rewards.model_copy(update={"verifier": verifier})
        tried = recipe.model_copy(update={"prompts": section, "rewards": rewards})
        try:
            chat = chat_of_recipe(tried, tokenizer)
            tried = chat.settled(tried)
            return tried, chat, load_prompts(tokenizer, tasks_of(tried), check_answers)
        except ValueError as error:
            problems.append(error)
    for problem in problems[1:]:
        problems[0].add_note(f"with rewards.verifier=code: {problem}")
    raise problems[0]


def _of_prompts(recipe: Recipe, chat: Chat, prompts: PromptSet, tokenizer: Any, positions: int, gpus: int) -> Choices:
    """The choices that depend on the prompts: template, tags, lengths, held-out prompts, batches, validations."""
    from megatron_scalerl.recipe.sections import PromptsSection
    from megatron_scalerl.rollouts.plans import forced_ids

    defaults = PromptsSection()
    lengths = [len(prompt.token_ids) for prompt in prompts.training]
    # one very long prompt must not take the room of all completions: half of the positions are theirs
    longest = min(max(lengths), defaults.max_prompt_tokens, positions // 2)
    usable = sum(length <= longest for length in lengths)
    if usable < 2:
        raise ValueError(f"{recipe.prompts.path}: one prompt is too few to train on one and to validate on another")
    held_out = min(int(defaults.held_out), max(usable // 10, min(FEWEST_HELD_OUT, usable // 2)))
    forced = len(forced_ids(recipe, tokenizer)[0]) + 1
    room = positions - longest - forced
    if room < SHORTEST:
        raise ValueError(
            f"policy.path: {positions} positions leave {max(0, room)} tokens for a completion, after prompts of "
            f"{longest} and {forced} forced ones; take a policy with a longer context"
        )
    longest_completion = recipe.max_completion_tokens
    why = "as in the paper"
    batch = recipe.rollouts.groups_per_batch
    group = recipe.rollouts.group_size
    validated = VALIDATED
    if not gpus:
        longest_completion = CPU_LONGEST
        why = "since CPUs are slow"
        batch = group = validated = CPU_BATCH
    completion = min(longest_completion, room)
    if completion < longest_completion:
        why = f"what {positions:,} positions leave"
    why = f"{completion:,} tokens with the answer, {why}"
    # the paper's proportions: 10k to 12k tokens of thinking and 2k of answer
    answer = completion // 7
    thinking = completion - answer
    return {
        "prompts.chat_template": (chat.chat_template, chat.why),
        "prompts.think_start": (chat.think_start, ""),
        "prompts.think_end": (chat.think_end, ""),
        "prompts.max_prompt_tokens": (longest, f"{usable:,} of {len(lengths):,} prompts are no longer"),
        "prompts.held_out": (held_out, "validations use them, training the others"),
        "interruption.enabled": (recipe.interruption.enabled, "true where thinking has a tag to close"),
        "interruption.thinking_tokens": ([thinking * 5 // 6, thinking], why),
        "interruption.answer_tokens": (answer, "a seventh of the completion"),
        "rollouts.groups_per_batch": (min(batch, usable - held_out), "prompts of a step"),
        "rollouts.group_size": (group, "completions of each"),
        "rewards.verifier": (recipe.rewards.verifier, "it can use the references of the file"),
        "validation.every_steps": (FIRST_STEPS, "steps between two validations"),
        "validation.prompts": (min(held_out, validated), "of those held out"),
        "validation.generations": (4, "completions of each"),
    }


def _of_layout(plan: RunPlan) -> Choices:
    """The choices that depend on the GPUs: the sizes of trainer and engines."""
    from megatron_scalerl.plan.text import fits

    recipe = plan.recipe
    choices = {
        "trainer.world_size": (recipe.trainer.world_size, fits(plan)),
        "megatron.parallel": (recipe.megatron.parallel, "the smallest groups that fit"),
        "megatron.model": (recipe.megatron.model, "the least recomputation that fits"),
        "engine.count": (recipe.engine.count, "the fastest split of the GPUs, by the planner"),
        "engine.devices_per_engine": (recipe.engine.devices_per_engine, ""),
        "engine.colocate": (recipe.engine.colocate, "trainer and engine take turns on a GPU"),
        "engine.vllm": (recipe.engine.vllm, ""),
    }
    return {key: choice for key, choice in choices.items() if choice[0] not in ({}, False)}


def _recipe(choices: Choices) -> Recipe:
    from megatron_scalerl.recipe.file import validated

    return validated(yaml.safe_load(_text(choices)), {})


def _text(choices: Choices) -> str:
    """The text of the recipe's file: a line for each choice, with its reason as a comment."""
    sections: dict[str, list[str]] = {}
    for key, (value, why) in choices.items():
        section, _, name = key.partition(".")
        line = f"{section}: {_json(value)}"
        heading = []
        if name:
            line = f"  {name}: {_json(value)}"
            heading = [f"{section}:"]
        if why:
            line = f"{line:<40}  # {why}"
        sections.setdefault(section, heading).append(line)
    return "\n".join(chain(*sections.values())) + "\n"


def _json(value: Any) -> str:
    """The value as JSON, which is YAML, too."""
    return json.dumps(value, ensure_ascii=False, default=str)

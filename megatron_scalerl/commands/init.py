"""`megatron-scalerl init`: write a recipe for a policy, a file of prompts and a number of GPUs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
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

Given settings are written unchanged. All other settings are chosen, with the reason in a comment on the line."""

Choices = dict[str, tuple[Any, str]]
"""Key of a setting, SECTION.NAME or NAME -> (value, reason for the value, which the recipe holds as a comment)."""
STEPS = 200
"""Number of steps of the run, unless the user gives a number."""
FIRST_STEPS = 20
"""Number of steps of a first look at the run (`train steps=20`)."""
SHORTEST = 16
"""Shortest completion for which a policy has to have room (tokens)."""
CPU_LENGTHS = (64, 256)
"""If CPUs generate, the maximum length of a completion is chosen from this range (tokens)."""
CPU_FLOPS = 3e12
"""FLOPs of a step on CPUs, about half a minute of one core. The longest completion is chosen to reach this number."""
SMALL = 1e9
"""Number of parameters below which a policy is small, and a chat policy is sampled at a lower temperature."""
CPU_BATCH = 8
"""If CPUs generate: the number of prompts of a step, and also of completions of each prompt."""
FEWEST_HELD_OUT = 4
"""Least number of held-out prompts, if the file has enough prompts."""
VALIDATED = 120
"""Number of completions of a validation, over all prompts."""
VALIDATIONS = 25
"""Number of validations of a run after step 0. A forecast from the first half of the run uses twelve of the
validations, as in the quickstart."""
SAVES = 10
"""Number of checkpoints that a run writes."""
PAPER_PARAMETERS = 8.03e9
"""Number of parameters of the ScaleRL paper's dense policy."""
STATE_BYTES = 12
"""Bytes of a checkpoint for each parameter that is trained: fp32 weights and Adam's moments."""
DOUBTS = {
    "prompts.chat_template": "use instead if the policy was tuned on conversations in this template",
    "prompts.think_start": "use instead if the policy was trained to think in these tags",
    "prompts.think_end": "",
    "interruption.enabled": "with these tags",
}
"""Key of a setting for which the recipe may hold an alternative value, as a comment -> text of the comment: when the
user should take the alternative."""
DOUBT_TOKENS = 32
"""Tokens that prompts.max_prompt_tokens leaves for a template or tags that the user may add (DOUBTS)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Write a recipe for a policy and a file of prompts, with the reason for each setting."
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
    """Write the recipe, and print the lines with reasons and the next commands. Raises ValueError for wrong options
    or files."""
    out = Path(arguments.out)
    if out.exists() and not arguments.force:
        raise ValueError(f"--out: {out} exists; name another file, or overwrite it with --force")
    from megatron_scalerl.launch.placement import visible_gpus
    from megatron_scalerl.plan.settings import check_settings

    gpus = arguments.gpus
    if gpus is None:
        gpus = len(visible_gpus())
    if gpus < 0:
        raise ValueError(f"--gpus: {gpus} is not a number of GPUs; use 0 for a run on CPUs")
    choices, doubts, cost = _choose(arguments, gpus)
    recipe = _recipe(choices)
    check_settings(recipe)
    devices = "the CPUs of this machine"
    number = "--gpus 0"
    if gpus:
        devices = f"{gpus} x {GPUS[arguments.gpu].name}"
        number = f"--gpus {recipe.devices} --gpu {arguments.gpu}"
    head = f"# Written by `megatron-scalerl init` for {devices}.\n# {cost}\n"
    text = _text(choices, doubts)
    out.write_text(head + text, encoding="utf8")
    for line in text.splitlines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{out} is written for {devices}. {cost}\nNext:\n  megatron-scalerl plan {out} {number} --check\n"
        f"  megatron-scalerl prompts {out}\n  megatron-scalerl train {out} steps={min(FIRST_STEPS, recipe.steps)}",
        highlight=False,
    )
    return 0


def _choose(arguments: argparse.Namespace, gpus: int) -> tuple[Choices, Mapping[str, Any], str]:
    """(settings with reasons, key -> alternative value to write as a comment, a sentence on the run's cost).

    Raises ValueError for a policy, a file or GPUs that cannot be used.
    """
    from megatron_scalerl.models import family, read_hf_config
    from megatron_scalerl.plan.counting import count, trained_family
    from megatron_scalerl.prompts.tokenizer import policy_tokenizer
    from megatron_scalerl.recipe.file import check_policy, check_prompts
    from megatron_scalerl.recipe.hub import local_recipe

    user_settings = _with_overrides({}, arguments.overrides)
    choices = {
        "name": (Path(arguments.out).stem, ""),
        "steps": (STEPS, f"optimizer steps of a first run; {FIRST_STEPS} are enough for a first look"),
        "output_dir": ("runs", "folder that will contain the run's folder"),
        "policy.path": (arguments.policy, ""),
        "policy.dtype": ("bfloat16", "for GPUs"),
        "prompts.path": (arguments.data, ""),
    }
    if not gpus:
        choices["policy.dtype"] = ("float32", "for CPUs")
    recipe = _recipe(_with_overrides(choices, arguments.overrides))
    recipe = local_recipe(recipe, download=recipe.download)
    check_policy(recipe)
    check_prompts(recipe)
    hf_config = read_hf_config(recipe.policy.path)
    policy = family(hf_config)
    tokenizer = policy_tokenizer(recipe, hf_config)
    parameters = count(policy).total
    choices["policy.path"] = (arguments.policy, f"family {policy.name}, {parameters:,} parameters")
    verifiers = ["math", "code"]
    if "rewards.verifier" in user_settings:
        verifiers = [recipe.rewards.verifier]
    recipe, chat, prompts = _read(recipe, tokenizer, verifiers)
    choices["prompts.path"] = (arguments.data, prompts.reports[0].layouts[0].partition(": ")[2])
    positions = hf_config.get_text_config().max_position_embeddings
    choices |= _prompt_choices(recipe, chat, prompts, tokenizer, positions, parameters, gpus)
    choices |= _training_choices(recipe, parameters, count(trained_family(recipe, policy)).total, gpus)
    choices = _with_overrides(choices, arguments.overrides)
    doubts = {key: value for key, value in chat.doubts.items() if key not in user_settings}
    config = Path(recipe.policy.path)
    if not gpus:
        from megatron_scalerl.plan.cpus import plan_on_cpus

        return (
            choices,
            doubts,
            f"{recipe.steps} steps, by the planner: {plan_on_cpus(_recipe(choices), config).verdict()}.",
        )
    from megatron_scalerl.plan.choose import choose

    plan = choose(_recipe(choices), config, gpus, GPUS[arguments.gpu])
    hours = plan.gpu_hours_per_1000_steps * recipe.steps / 1000
    cost = f"{recipe.steps} steps take {hours:,.1f} GPU-hours by the planner; a real run may take five times as many."
    return _with_overrides(choices | _layout_choices(plan), arguments.overrides), doubts, cost


def _with_overrides(choices: Choices, overrides: Sequence[str]) -> Choices:
    """The choices, replaced by the user's settings; `engine.vllm.x=1` is merged into the chosen engine.vllm.

    Raises `RecipeError` for a setting that is not KEY=VALUE.
    """
    from megatron_scalerl.recipe.file import merged, override

    joined_choices = dict(choices)
    for item in overrides:
        data: dict[str, Any] = {}
        override(data, item)
        [(section, value)] = data.items()
        settings = {section: value}
        if isinstance(value, dict):
            settings = {f"{section}.{name}": inner for name, inner in value.items()}
        nested = item.partition("=")[0].count(".") > 1
        for key, setting in settings.items():
            chosen = joined_choices.get(key, (None, ""))[0]
            if nested and isinstance(chosen, dict):
                setting = merged(chosen, setting)
            joined_choices[key] = (setting, "as given")
    return joined_choices


def _read(recipe: Recipe, tokenizer: Any, verifiers: Sequence[str]) -> tuple[Recipe, Chat, PromptSet]:
    """(recipe with the first verifier that can use the file's references, chat format, all prompts for training).

    Raises ValueError with the reason of each verifier if no verifier can use the references.
    """
    from megatron_scalerl.controller.preflight import check_answers
    from megatron_scalerl.prompts.chat import chat_of_recipe
    from megatron_scalerl.prompts.dataset import load_prompts
    from megatron_scalerl.recipe.tasks import tasks_of

    # No prompt is held out or too long here: `_prompt_choices` decides about both when the lengths are known.
    recipe = recipe.with_settings(prompts={"held_out": 0, "max_prompt_tokens": sys.maxsize})
    problems = []
    for verifier in verifiers:
        candidate = recipe.with_settings(rewards={"verifier": verifier})
        try:
            chat = chat_of_recipe(candidate, tokenizer)
            candidate = chat.settled(candidate)
            return candidate, chat, load_prompts(tokenizer, tasks_of(candidate), check_answers)
        except ValueError as error:
            problems.append(error)
    for problem in problems[1:]:
        problems[0].add_note(f"with rewards.verifier=code: {problem}")
    raise problems[0]


def _prompt_choices(
    recipe: Recipe, chat: Chat, prompts: PromptSet, tokenizer: Any, positions: int, parameters: int, gpus: int
) -> Choices:
    """The choices that depend on the prompts: template, tags, lengths, held-out prompts, batches, validations."""
    from megatron_scalerl.plan.choose import lengths_of
    from megatron_scalerl.recipe.sections import PromptsSection
    from megatron_scalerl.rollouts.plans import forced_ids

    defaults = PromptsSection()
    lengths = [len(prompt.token_ids) for prompt in prompts.training]
    # half of the positions stay free for completions, so that one very long prompt does not make all completions
    # short
    spare = DOUBT_TOKENS if chat.doubts else 0
    longest = min(max(lengths) + spare, defaults.max_prompt_tokens, positions // 2)
    usable = sum(length <= longest for length in lengths)
    if usable < 2:
        raise ValueError(f"{recipe.prompts.path}: {usable} usable prompts are too few to train and to validate on")
    held_out = _held_out(usable, int(defaults.held_out))
    validated = min(held_out, VALIDATED)
    generations = -(-VALIDATED // validated)
    forced = len(forced_ids(recipe, tokenizer)[0]) + 1
    room = positions - longest - forced
    if room < SHORTEST:
        raise ValueError(
            f"policy.path: {positions} positions leave {max(0, room)} tokens for a completion, after prompts of "
            f"{longest} and {forced} forced tokens; take a policy with a longer context"
        )
    longest_completion = recipe.max_completion_tokens
    reason = "as in the ScaleRL paper"
    batch = recipe.rollouts.groups_per_batch
    group = recipe.rollouts.group_size
    if not gpus:
        batch = group = CPU_BATCH
        shortest, longest_completion = CPU_LENGTHS
        affordable = int(CPU_FLOPS / (6 * parameters * batch * group)) - longest
        longest_completion = max(shortest, min(longest_completion, affordable))
        reason = "few, since the time of a step on CPUs grows with the tokens"
    completion = min(longest_completion, room)
    if completion < longest_completion:
        reason = f"as many as {positions:,} positions allow after the prompt"
    reason = f"{completion:,} tokens with the answer, {reason}"
    budget = lengths_of(completion)
    template_reason, _, tag_reason = chat.why.rpartition("; ")
    return {
        "prompts.chat_template": (chat.chat_template, template_reason),
        "prompts.think_start": (chat.think_start, ""),
        "prompts.think_end": (chat.think_end, tag_reason),
        "prompts.max_prompt_tokens": (longest, f"{usable:,} of {len(lengths):,} prompts have at most this length"),
        "prompts.held_out": (held_out, "prompts for validation alone; training uses all further prompts"),
        "interruption.enabled": (recipe.interruption.enabled, "true if a tag closes the thinking"),
        "interruption.thinking_tokens": (budget["thinking_tokens"], reason),
        "interruption.answer_tokens": (budget["answer_tokens"], "a seventh of the completion"),
        "rollouts.groups_per_batch": (min(batch, usable - held_out), "prompts of a step"),
        "rollouts.group_size": (group, "completions of each prompt"),
        "rewards.verifier": (recipe.rewards.verifier, "the first verifier that can use the file's references"),
        "validation.prompts": (validated, "held-out prompts of a validation"),
        "validation.generations": (generations, f"completions of each: {validated * generations} give +-0.09 (95 %)"),
        "validation.end_generations": (4 * generations, "at step 0 and at the end, since the gain is the difference"),
    }


def _held_out(usable: int, limit: int) -> int:
    """Number of prompts to hold out: a tenth of the usable prompts, or more for a forecast; at most `limit`.

    For a forecast the number is at least VALIDATED, or a quarter of the usable prompts if a quarter is less. From a
    short file at least FEWEST_HELD_OUT prompts are held out, or half of the usable prompts if half is less.
    """
    minimum = max(min(FEWEST_HELD_OUT, usable // 2), min(VALIDATED, usable // 4))
    return min(limit, max(usable // 10, minimum))


def _training_choices(recipe: Recipe, parameters: int, trained_parameters: int, gpus: int) -> Choices:
    """The choices that depend on the number of steps, on GPUs or CPUs, and on the number of parameters.

    trained_parameters: number of parameters that are trained.
    """
    from megatron_scalerl.processes.logs import size
    from megatron_scalerl.recipe.sections import ADAPTERS_LR, OptimizerSection

    paper = OptimizerSection()
    rate = paper.lr * max(1.0, (PAPER_PARAMETERS / parameters) ** 0.5)
    rate_reason = f"the ScaleRL paper's {paper.lr:g} for 8B, x sqrt(8B / parameters) as in Tinker's cookbook"
    if recipe.policy.lora is not None:
        rate *= ADAPTERS_LR / paper.lr
        rate_reason += ", x 10 for adapters (Schulman et al. 2025)"
    warm_up = min(paper.warmup_steps, max(1, recipe.steps // 20))
    validation_interval = max(1, recipe.steps // VALIDATIONS)
    checkpoint_interval = max(1, recipe.steps // SAVES)
    temperature = recipe.rollouts.temperature
    temperature_reason = "sample from the policy's own distribution"
    if recipe.prompts.chat_template and parameters < SMALL:
        temperature = 0.7
        temperature_reason = "small chat policies write incoherent text at temperature 1"
    staleness = recipe.rollouts.max_staleness_steps
    staleness_reason = "PipelineRL-8, as in the ScaleRL paper"
    if not gpus:
        staleness = 1
        staleness_reason = "on CPUs the engines are ahead of the trainer, so completions reach this limit"
    bytes_each = size(STATE_BYTES * trained_parameters)
    return {
        "rollouts.max_staleness_steps": (staleness, staleness_reason),
        "rollouts.temperature": (temperature, temperature_reason),
        "optimizer.lr": (float(f"{rate:.1e}"), rate_reason),
        "optimizer.warmup_steps": (warm_up, "a twentieth of the steps; the paper: 100 of 7,400"),
        "validation.every_steps": (
            validation_interval,
            f"{VALIDATIONS} validations, for a forecast from the first half",
        ),
        "forecast.fit_from_steps": (validation_interval, "the first validation after step 0"),
        "checkpoint.every_steps": (
            checkpoint_interval,
            f"a crash loses at most this many steps; 2 checkpoints are kept, {bytes_each} each",
        ),
    }


def _layout_choices(plan: RunPlan) -> Choices:
    """The choices that depend on the GPUs: the sizes of trainer and engines."""
    from megatron_scalerl.plan.text import fits

    recipe = plan.recipe
    choices = {
        "trainer.world_size": (recipe.trainer.world_size, fits(plan)),
        "megatron.parallel": (recipe.megatron.parallel, "the smallest groups that fit"),
        "megatron.model": (recipe.megatron.model, "the least recomputation that fits into memory"),
        "engine.count": (recipe.engine.count, "the fastest split of the GPUs, by the planner"),
        "engine.devices_per_engine": (recipe.engine.devices_per_engine, ""),
        "engine.colocate": (recipe.engine.colocate, "trainer and engine take turns on a GPU"),
        "engine.vllm": (recipe.engine.vllm, ""),
    }
    return {key: choice for key, choice in choices.items() if choice[0] not in ({}, False)}


def _recipe(choices: Choices) -> Recipe:
    from megatron_scalerl.recipe.file import validated

    return validated(yaml.safe_load(_text(choices, {})), {})


def _text(choices: Choices, doubts: Mapping[str, Any]) -> str:
    """The recipe as YAML: a line with reason for each choice, and a commented line for each alternative in
    `doubts`."""
    sections: dict[str, list[str]] = {}
    for key, (value, reason) in choices.items():
        section, _, name = key.partition(".")
        lines = sections.setdefault(section, [f"{section}:"] if name else [])
        indent = "  " if name else ""
        lines.append(_line(f"{indent}{name or section}: {_json(value)}", reason))
        if key in doubts:
            lines.append(_line(f"{indent}# {name}: {_json(doubts[key])}", DOUBTS[key]))
    return "\n".join(chain(*sections.values())) + "\n"


def _line(setting: str, reason: str) -> str:
    return f"{setting:<40}  # {reason}" if reason else setting


def _json(value: Any) -> str:
    """The value as JSON, which is also valid YAML."""
    return json.dumps(value, ensure_ascii=False, default=str)

"""Checks before any process starts: files, policy, parallel layout, tokenizer, think tags, lengths.

Every check fails with a one-line error and leaves no files behind.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from megatron_scalerl.checkpoints.weight_map import check_weights
from megatron_scalerl.engine.options import check_options
from megatron_scalerl.evaluation.inputs import Evaluated, evaluation_inputs, longest_sequence
from megatron_scalerl.launch.local_server import bind_server
from megatron_scalerl.losses import make_loss
from megatron_scalerl.models import family, read_hf_config
from megatron_scalerl.prompts.dataset import PROMPTS_CHANGED, PromptSet, load_prompts
from megatron_scalerl.prompts.tokenizer import policy_tokenizer
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import check_policy, check_prompts, read_run_recipe
from megatron_scalerl.recipe.parallel_layout import check_sharding
from megatron_scalerl.recipe.tasks import Task, tasks_of
from megatron_scalerl.rewards.code_checks import check_tests
from megatron_scalerl.rewards.code_tests import parse_tests
from megatron_scalerl.rewards.math import check_references
from megatron_scalerl.rewards.pool import limits_of
from megatron_scalerl.rewards.sandbox_probe import check_sandbox

_END = 1 << 16
"""Bytes at the end of a file of weights that its digest reads."""
MOST_REFERENCES = 10_000
"""Mathematical references of a file that are checked before a run: in 60 s on two processors, at 10 ms each."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of a run."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    evaluation: Evaluated | None
    longest_sequence: int
    """Longest prompt and completion together, with forced phrase and end (tokens)."""
    micro_batch_tokens: int
    """Capacity of one packed micro-batch (tokens)."""

    def resolved(self, recipe: Recipe) -> Recipe:
        """The recipe with digests of policy and prompts, the engine's context length and the trainer's capacity."""
        options = {"max_model_len": self.longest_sequence, **recipe.engine.vllm}
        trainer = recipe.trainer.model_copy(update={"micro_batch_tokens": self.micro_batch_tokens})
        engine = recipe.engine.model_copy(update={"vllm": options})
        prompts = recipe.prompts.model_copy(update={"digest": self.prompts.digest()})
        policy = recipe.policy.model_copy(update={"digest": policy_digest(recipe.policy.path)})
        changed = {"engine": engine, "trainer": trainer, "policy": policy, "prompts": prompts}
        return recipe.model_copy(update=changed)


def policy_digest(folder: str) -> str:
    """16 hexadecimal digits for a policy's folder, in milliseconds: of weights only names, sizes and ends are read.

    Other files than configuration, tokenizer, template and weights do not count.
    """
    whole = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in (".json", ".txt", ".jinja", ".model", ".safetensors"):
            continue
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END) if path.suffix == ".safetensors" else 0)
            whole.update(f"{path.name} {size} {hashlib.sha256(file.read()).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def check_inputs(recipe: Recipe, *, on_this_host: bool = True) -> Inputs:
    """Load and check the recipe's inputs. Raises ValueError: one line with key or row, expected, found.

    on_this_host: the run is to start here, which needs its sandboxes and ports.
    """
    check_policy(recipe)
    check_prompts(recipe)
    check_options(recipe.engine.vllm)
    make_loss(recipe.loss.name, recipe.loss.arguments)
    if on_this_host:
        _check_host(recipe)
    hf_config = read_hf_config(recipe.policy.path)
    _check_layout(recipe, hf_config)
    tokenizer = policy_tokenizer(recipe, hf_config)
    check_weights(recipe.policy.path)
    prompts = checked_prompts(recipe, tokenizer)
    evaluation = evaluation_inputs(recipe, tokenizer, prompts.training)
    capacity = _micro_batch_tokens(recipe)
    longest = longest_sequence(recipe, hf_config, tokenizer, capacity=capacity)
    return Inputs(
        tokenizer=tokenizer,
        prompts=prompts,
        evaluation=evaluation,
        longest_sequence=longest,
        micro_batch_tokens=capacity,
    )


def checked_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The recipe's prompts, rendered and split. Raises ValueError as `load_prompts`, and for prompts that changed."""
    prompts = load_prompts(tokenizer, tasks_of(recipe), check_answers)
    digest = prompts.digest()
    if recipe.prompts.digest not in (None, digest):
        raise ValueError(f"prompts.digest: {PROMPTS_CHANGED}: they were {recipe.prompts.digest}, and are {digest}")
    for task in tasks_of(recipe) if recipe.validation.every_steps else ():
        if all(prompt.task != task.name or prompts.problems.get(prompt.prompt_id) for prompt in prompts.held_out):
            raise ValueError(
                f"validation.every_steps: there are no held-out prompts to validate on; set {task.key}.held_out"
            )
    return prompts


def _check_host(recipe: Recipe) -> None:
    """Raises ValueError if this host lacks a port or the verifier code's sandbox."""
    for task in tasks_of(recipe):
        if task.rewards.verifier == "code":
            check_sandbox(limits_of(task.rewards))
    for index in range(recipe.engine.count if recipe.engine.port else 0):
        bind_server(recipe.engine.host, recipe.engine.port + index).close()


def check_answers(
    task: Task, answers: Sequence[tuple[str, str, Mapping[str, Any]]]
) -> tuple[list[str], list[str | None]]:
    """As `CheckAnswers`.

    Of mathematical references beside whole numbers, those MOST_REFERENCES with the smallest hashes are checked. Tests
    are tried with programs (`code_checks`).
    """
    if task.rewards.verifier == "math":
        texts = {answer for _, answer, _ in answers}
        rest = [text for text in texts if not text.isdecimal()]
        texts -= {*sorted(rest, key=lambda text: hashlib.sha256(text.encode()).digest())[MOST_REFERENCES:]}
        found = dict(zip(texts, check_references([*texts])))
        return (
            [found.get(answer, "") for _, answer, _ in answers],
            ["" if answer in found else None for _, answer, _ in answers],
        )
    if task.rewards.verifier != "code":
        return [""] * len(answers), [""] * len(answers)
    problems = [_problem_of_tests(*row) for row in answers]
    readable = [row for row, problem in zip(answers, problems) if not problem]
    tried = iter(check_tests(readable, limits_of(task.rewards)))
    return problems, ["" if problem else next(tried) for problem in problems]


def _problem_of_tests(question: str, answer: str, columns: Mapping[str, Any]) -> str:
    """Why tests cannot be run, or nothing."""
    try:
        called = parse_tests(answer, columns).called
    except ValueError as error:
        return str(error)
    if not called or any(name in question for name in called):
        return ""
    return f"expected a problem that names the function of its tests, {' or '.join(sorted(called))}, found none"


def _check_layout(recipe: Recipe, hf_config: PretrainedConfig) -> None:
    """Raises ValueError for settings that Megatron would reject on every rank."""
    policy = family(hf_config)
    check_sharding(policy, recipe.megatron.parallel, recipe.megatron.model)
    m = recipe.megatron
    if m.model or m.parallel or m.ddp or m.optimizer:
        from megatron_scalerl.trainer.options import check_megatron  # slow: only if there is something to check

        check_megatron(policy, recipe)


def _micro_batch_tokens(recipe: Recipe) -> int:
    """A run that resumes keeps its capacity if the recipe does not set one."""
    if recipe.trainer.micro_batch_tokens is None and Path(recipe.run_dir, "recipe.yaml").exists():
        found = (read_run_recipe(recipe.run_dir).get("trainer") or {}).get("micro_batch_tokens")
        return found or recipe.micro_batch_tokens
    return recipe.micro_batch_tokens

"""Checks before any process starts: files, weights, prompts, this host, and the settings (`plan.settings`).

Every check fails with a one-line error and leaves no files behind.
"""

import asyncio
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_scalerl.checkpoints.weight_map import check_weights
from megatron_scalerl.environments.pool import try_out
from megatron_scalerl.evaluation.inputs import EvaluationInputs, evaluation_inputs
from megatron_scalerl.launch.local_server import bind_server
from megatron_scalerl.plan.settings import Settings, check_settings
from megatron_scalerl.prompts.dataset import PROMPTS_CHANGED, PromptSet, load_prompts
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import check_policy, check_prompts
from megatron_scalerl.recipe.tasks import Task, tasks_of
from megatron_scalerl.rewards.code_checks import check_tests, remembered
from megatron_scalerl.rewards.code_tests import parse_tests
from megatron_scalerl.rewards.math import check_references
from megatron_scalerl.rewards.pool import limits_of
from megatron_scalerl.rewards.sandbox_probe import check_sandbox
from megatron_scalerl.trainer.ranks import check_device

_END = 1 << 16
"""Number of bytes at the end of each safetensors file that `policy_digest` reads."""
MOST_REFERENCES = 10_000
"""Largest number of mathematical references of a task that are checked before a run. The check of 10,000 references
takes 60 s on two processors, about 10 ms per reference."""


@dataclass(frozen=True, kw_only=True)
class Inputs(Settings):
    """The checked inputs of a run."""

    prompts: PromptSet
    evaluation: EvaluationInputs | None

    def resolved(self, recipe: Recipe) -> Recipe:
        """The recipe with all defaults filled in: prompt settings, digests, max_model_len and micro_batch_tokens."""
        recipe = self.chat.settled(recipe)
        options = {"max_model_len": self.longest_sequence, **recipe.engine.vllm}
        digest = policy_digest(recipe.policy.path)
        if recipe.policy.adapter is not None:
            digest += policy_digest(recipe.policy.adapter, end=1 << 40)
        kl = recipe.algorithm.kl
        if kl is not None and kl.to != "base":
            digest += policy_digest(kl.to)
        for _, teacher in sorted(recipe.algorithm.teachers.items()):
            digest += policy_digest(teacher.path)
        return recipe.with_settings(
            engine={"vllm": options},
            trainer={"micro_batch_tokens": self.micro_batch_tokens},
            policy={"digest": digest},
            prompts={"digest": self.prompts.digest()},
        )


def policy_digest(folder: str, *, end: int = _END) -> str:
    """A digest of the files in a policy's folder: 16 hexadecimal digits.

    Of weight files (safetensors) the digest covers only names, sizes and ends, and so takes milliseconds. Files of
    configuration, tokenizer and template are covered in full. Files of all other suffixes are left out.

    end: number of bytes at the end of a weight file to read.
    """
    folder_hash = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in (".json", ".txt", ".jinja", ".model", ".safetensors"):
            continue
        with path.open("rb") as file:
            # Further training changes values but no file size, so the last bytes of weight files are read, too.
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - end) if path.suffix == ".safetensors" else 0)
            folder_hash.update(f"{path.name} {size} {hashlib.sha256(file.read()).hexdigest()}\n".encode())
    return folder_hash.hexdigest()[:16]


def check_inputs(recipe: Recipe, *, on_this_host: bool = True) -> Inputs:
    """Load and check the recipe's inputs. Raises ValueError: one line that names the key or the row.

    on_this_host: True if the run starts on this host, so that GPUs, sandboxes and ports are checked, too.
    """
    check_policy(recipe)
    check_prompts(recipe)
    settings = check_settings(recipe)
    if on_this_host:
        _check_host(recipe)
    check_weights(recipe.policy.path)
    prompts = checked_prompts(settings.recipe, settings.tokenizer)
    for task in tasks_of(recipe):
        if on_this_host and task.episodes:
            first = next(prompt for prompt in prompts.training if prompt.task == task.name)
            asyncio.run(try_out(task.recipe.environment, first))
    evaluation = evaluation_inputs(settings.recipe, settings.tokenizer, prompts.training)
    return Inputs(**vars(settings), prompts=prompts, evaluation=evaluation)


def checked_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The recipe's prompts, rendered and split into training and held-out prompts.

    Raises ValueError if the prompts differ from prompts.digest, if a validated task has no held-out prompts, and for
    the reasons of `load_prompts`.
    """
    prompts = load_prompts(tokenizer, tasks_of(recipe), check_answers)
    digest = prompts.digest()
    if recipe.prompts.digest not in (None, digest):
        raise ValueError(f"prompts.digest: {PROMPTS_CHANGED}: the digest was {recipe.prompts.digest}, now {digest}")
    if not recipe.validation.every_steps:
        return prompts
    usable = {prompt.task for prompt in prompts.held_out if not prompts.problems.get(prompt.prompt_id)}
    for task in tasks_of(recipe):
        if task.name not in usable:
            raise ValueError(
                f"validation.every_steps: there are no held-out prompts to validate on; set {task.key}.held_out"
            )
    return prompts


def _check_host(recipe: Recipe) -> None:
    """Raises ValueError if this host lacks a GPU, a free engine port or sandboxes for tests (verifier: code)."""
    check_device(recipe)
    for task in tasks_of(recipe):
        if task.rewards.verifier == "code":
            check_sandbox(limits_of(task.rewards))
    if recipe.engine.port:
        for index in range(len(recipe.engine_devices)):
            bind_server(recipe.engine.host, recipe.engine.port + index).close()


def check_answers(
    task: Task, answers: Sequence[tuple[str, str, Mapping[str, Any]]]
) -> tuple[list[str], list[str | None]]:
    """Check the reference answers of a task; arguments and result are described at `prompts.dataset.CheckAnswers`.

    At most MOST_REFERENCES mathematical references that are no whole numbers are checked. With the verifier `code`
    each problem's tests are tried out: a wrong program has to fail, the problem's own solution has to pass
    (`code_checks`). Answers of episodes are left to the environment.
    """
    if task.episodes:
        return [""] * len(answers), [None] * len(answers)
    if task.rewards.verifier == "math":
        texts = {answer for _, answer, _ in answers}
        slow = [text for text in texts if not text.isdecimal()]
        # Sorting by hash makes every start check the same references, whatever the order in the file is.
        slow.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
        texts -= {*slow[MOST_REFERENCES:]}
        ordered = sorted(texts)
        by_text = remembered(ordered, None, lambda: dict(zip(ordered, check_references(ordered))))
        try_results = dict.fromkeys(by_text, "")
        return (
            [by_text.get(answer, "") for _, answer, _ in answers],
            [try_results.get(answer) for _, answer, _ in answers],
        )
    if task.rewards.verifier != "code":
        return [""] * len(answers), [""] * len(answers)
    problems = [_problem_of_tests(*row) for row in answers]
    readable = [row for row, problem in zip(answers, problems) if not problem]
    test_results = iter(check_tests(readable, limits_of(task.rewards)))
    return problems, ["" if problem else next(test_results) for problem in problems]


def _problem_of_tests(question: str, answer: str, columns: Mapping[str, Any]) -> str:
    """The reason why the tests of a programming problem cannot be run; empty if the tests can be run."""
    try:
        called = parse_tests(answer, columns).called
    except ValueError as error:
        return str(error)
    if not called or any(name in question for name in called):
        return ""
    return f"the problem does not name {' or '.join(sorted(called))}, the function that its tests call"

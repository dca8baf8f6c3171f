"""What an evaluation of a folder needs, checked before any process starts: recipe, tokenizer, problems, prompts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.weight_map import check_weights
from megatron_scalerl.engine.options import check_options
from megatron_scalerl.evaluation.problems import Problem, ProblemFile
from megatron_scalerl.models import read_hf_config
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.prompts.tokenizer import policy_tokenizer
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import check_policy
from megatron_scalerl.recipe.tasks import tasks_of
from megatron_scalerl.rollouts.plans import forced_ids
from megatron_scalerl.types import Prompt

_LIMITS = ("cpu_s", "timeout_s", "memory_mb", "file_mb")
"""Keys of rewards with which an answer that is stopped counts as wrong."""
_CAPACITY = re.compile(
    "max_.*|.*memory.*|.*_parallel_size|.*parallel_backend|swap_space|block_size|async_scheduling|"
    "enforce_eager|compilation_config|disable_log_.*|enable_log_.*|middleware"
)
"""Options of vLLM with which an interrupted evaluation goes on: a machine may have less memory or fewer devices."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The checked inputs of an evaluation. Produced by `check_evaluation`."""

    recipe: Recipe
    """With the engines' context length filled in."""
    budgets: tuple[int | None, ...]
    """Thinking budgets; (None,): the recipe's interruption."""
    tokenizer: Any
    """Of the policy's folder, from transformers."""
    files: tuple[ProblemFile, ...]
    prompts: dict[str, tuple[Prompt, ...]]
    """File name -> [P] its problems as prompts."""

    @property
    def engine_recipe(self) -> Recipe:
        """The recipe of the engines, whose context is that of the largest budget."""
        return at_budget(self.recipe, max((b for b in self.budgets if b is not None), default=None))

    def recipe_at(self, budget: int | None) -> Recipe:
        """The recipe with thinking interrupted after exactly `budget` tokens; None: as it is."""
        return at_budget(self.recipe, budget)


def at_budget(recipe: Recipe, budget: int | None) -> Recipe:
    """The recipe with thinking interrupted after exactly `budget` tokens; None: as it is."""
    if budget is None:
        return recipe
    section = recipe.interruption.model_copy(update={"enabled": True, "thinking_tokens": (budget, budget)})
    return recipe.model_copy(update={"interruption": section})


def recipe_of_task(recipe: Recipe) -> Recipe:
    """The recipe of evaluation.task alone: its template and verifier are those of the evaluation.

    Raises ValueError for a task that the recipe lacks, and for a recipe with prompts.tasks that names none.
    """
    name = recipe.evaluation.task or ""
    task = next((task for task in tasks_of(recipe) if task.name == name), None)
    if task is None:
        known = ", ".join(task.name for task in tasks_of(recipe))
        expected = f"one of {known}" if known else "none in a recipe without prompts.tasks"
        raise ValueError(f"evaluation.task: expected {expected}, found {name or 'none'}")
    section = recipe.evaluation.model_copy(update={"task": None})
    return recipe.model_copy(update={"prompts": task.prompts, "rewards": task.rewards, "evaluation": section})


def check_evaluation(recipe: Recipe, files: Sequence[ProblemFile], budgets: Sequence[int] = ()) -> Evaluated:
    """Check a policy's folder, tokenizer and context against the problems; recipe.policy.path is the folder.

    Of a recipe with prompts.tasks, evaluation.task is evaluated.

    Raises ValueError, in one line with key or row: a task that is missing, an option that vLLM does not know, think
    tags or a phrase that do not survive the tokenizer, two files of one name, a prompt longer than
    prompts.max_prompt_tokens (a problem that is left out would change the score), and a context that is too short
    for the longest completion.
    """
    recipe = recipe_of_task(recipe)
    check_policy(recipe)
    check_options(recipe.engine.vllm)
    names = [file.name for file in files]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"--data: expected files of different names, found two called {double!r}")
    hf_config = read_hf_config(recipe.policy.path)
    tokenizer = policy_tokenizer(recipe, hf_config)
    check_weights(recipe.policy.path)
    longest_recipe = at_budget(recipe, max(budgets, default=None))
    phrase_ids, _ = forced_ids(longest_recipe, tokenizer)
    longest = longest_recipe.longest_sequence(len(phrase_ids))
    context = getattr(hf_config.get_text_config(), "max_position_embeddings", longest)
    for key, limit in (
        ("engine.vllm.max_model_len", recipe.engine.vllm.get("max_model_len") or longest),
        ("max_position_embeddings of the policy", context),
    ):
        if longest > limit:
            raise ValueError(
                f"{key}: expected at least {longest} (prompts.max_prompt_tokens {recipe.prompts.max_prompt_tokens} + "
                f"thinking {longest_recipe.interruption.thinking_tokens[1]} + phrase + answer), found {limit}"
            )
    prompts = {file.name: render(file, tokenizer, recipe) for file in files}
    engine = recipe.engine.model_copy(update={"vllm": {"max_model_len": longest, **recipe.engine.vllm}})
    # neither changes a completion or whether it is correct
    rewards = recipe.rewards.model_copy(update={"length_penalty": None})
    rollouts = recipe.rollouts.model_copy(update={"routing_replay": False})
    return Evaluated(
        recipe=recipe.model_copy(update={"engine": engine, "rewards": rewards, "rollouts": rollouts}),
        budgets=tuple(budgets) or (None,),
        tokenizer=tokenizer,
        files=tuple(files),
        prompts=prompts,
    )


def render(file: ProblemFile, tokenizer: Any, recipe: Recipe) -> tuple[Prompt, ...]:
    """[P] the problems of a file as the recipe renders prompts. Raises ValueError for one that is too long."""
    limit = recipe.prompts.max_prompt_tokens
    ids = PromptRenderer(tokenizer, recipe.prompts).token_ids([problem.text for problem in file.problems])
    for problem, token_ids in zip(file.problems, ids):
        if len(token_ids) > limit:
            raise ValueError(
                f"{problem.where}: expected at most {limit} tokens (prompts.max_prompt_tokens), "
                f"found {len(token_ids)}"
            )
    return tuple(_prompt(problem, token_ids) for problem, token_ids in zip(file.problems, ids))


def _prompt(problem: Problem, token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        prompt_id=problem.problem_id,
        text=problem.text,
        answer=problem.answer,
        token_ids=token_ids,
        extra=problem.extra,
    )


def settings(recipe: Recipe, *, k: int, budgets: Sequence[int | None]) -> dict[str, Any]:
    """What of a recipe decides the completions and scores of an evaluation, as JSON data.

    Of vLLM's options all but those of its capacity and of its processes, which decide how fast it is.
    """
    prompts = recipe.prompts.model_dump(mode="json")
    rendering = ("prompt_template", "chat_template", "template_date", "add_bos", "think_start", "think_end")
    return {
        "k": k,
        "budgets": list(budgets),
        "dtype": recipe.policy.dtype,
        "logits": recipe.policy.logits,
        "temperature": recipe.rollouts.temperature,
        "verifier": recipe.rewards.verifier,
        "verifier_limits": {name: getattr(recipe.rewards, name) for name in _LIMITS},
        "vllm": {name: value for name, value in sorted(recipe.engine.vllm.items()) if not _CAPACITY.fullmatch(name)},
        "interruption": recipe.interruption.model_dump(mode="json"),
        **{key: prompts[key] for key in rendering},
    }


def policy_digest(folder: str | Path) -> str:
    """SHA-256 (hexadecimal) of the names and contents of a Hugging Face folder's files. Raises OSError."""
    whole = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()

"""The inputs of an evaluation, checked before any process starts: recipe, tokenizer, problems, prompts."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.weight_map import check_weights
from megatron_scalerl.engine.options import check_options
from megatron_scalerl.evaluation.completing import Completer, Request, row_of
from megatron_scalerl.evaluation.contamination import Contamination, Text, contamination
from megatron_scalerl.evaluation.problems import ProblemFile, read_problems, split_schema
from megatron_scalerl.evaluation.results import Header, Key, ResultFile
from megatron_scalerl.models import read_hf_config
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.prompts.chat import chat_of_recipe
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.prompts.tokenizer import policy_tokenizer
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import check_policy
from megatron_scalerl.recipe.tasks import tasks_of
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.plans import longest_sequence
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion
from megatron_scalerl.types import CompletionLost, Prompt

_LIMITS = ("cpu_s", "timeout_s", "memory_mb", "file_mb")
"""Keys of the section rewards that limit an answer. An answer that is stopped at a limit counts as wrong."""
_CAPACITY = re.compile(
    "max_.*|.*memory.*|.*_parallel_size|.*parallel_backend|swap_space|block_size|async_scheduling|"
    "enforce_eager|compilation_config|disable_log_.*|enable_log_.*|middleware"
)
"""Pattern of vLLM's options that may change before an evaluation is resumed, on a machine with less memory or
fewer devices."""


@record
class EvaluationInputs:
    """The checked inputs of an evaluation. Produced by `check_evaluation` and `evaluation_inputs`."""

    recipe: Recipe
    """The recipe of one task. If a folder is evaluated, engine.vllm.max_model_len is filled in."""
    budgets: tuple[int | None, ...] = (None,)
    """Thinking budgets. The value (None,) stands for the recipe's interruption."""
    tokenizer: Any
    """The tokenizer of the policy's folder, from transformers."""
    files: tuple[ProblemFile, ...]
    prompts: dict[str, tuple[Prompt, ...]]
    """File name -> [P] problems of the file as prompts."""
    contaminations: Mapping[str, Contamination] = field(default_factory=dict)
    """File name -> hits by training prompts; empty without a comparison."""

    def keys(self, k: int) -> list[Key]:
        """The keys of all completions: file after file, the largest budget first, all problems for each index."""
        keys = []
        for file in self.files:
            for budget in sorted(self.budgets, key=lambda budget: budget or 0, reverse=True):
                for index in range(k):
                    for problem in file.problems:
                        keys.append(Key(file=file.name, number=problem.number, index=index, budget=budget))
        return keys

    async def complete(
        self,
        result: ResultFile,
        completer: Completer,
        samplers: Mapping[int | None, Sampler],
        *,
        k: int,
        seed: int,
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        """Generate and score the completions that `result` lacks. Raises as `Completer.complete_all`, and OSError if
        a row cannot be written.

        samplers: budget -> sampler with this budget. A completion has the same seed at every budget. finished: called
        after each new row.
        """
        requests = []
        for key in result.missing(self.keys(k)):
            sampler = samplers[key.budget]
            prompt = self.prompts[key.file][key.number - 1]
            draw = sampler.draw(prompt, seed, key.number, key.index)
            requests.append(Request(key=key, prompt=prompt, draw=draw, sampler=sampler))

        def take(request: Request, completion: ScoredCompletion | CompletionLost) -> None:
            result.append(row_of(request, completion, self.tokenizer))
            finished()

        await completer.complete_all(requests, take)

    def header(self, *, policy: str, digest: str, version: int, seed: int, k: int) -> Header:
        """The first line of the result file, which identifies this evaluation."""
        return Header(
            policy=policy,
            digest=digest,
            version=version,
            files=tuple((file.name, file.digest) for file in self.files),
            seed=seed,
            settings=settings(self.recipe, k=k, budgets=self.budgets),
        )

    def lines(self) -> list[str]:
        """The hits by training prompts, a line for each file that was compared."""
        compared = [file for file in self.files if file.name in self.contaminations]
        return [f"{printable(file.path)}: {self.contaminations[file.name].line()}" for file in compared]


def at_budget(recipe: Recipe, budget: int | None) -> Recipe:
    """The recipe with thinking interrupted after exactly `budget` tokens; None: the recipe unchanged."""
    if budget is None:
        return recipe
    return recipe.with_settings(interruption={"enabled": True, "thinking_tokens": (budget, budget)})


def recipe_of_task(recipe: Recipe) -> Recipe:
    """The recipe of evaluation.task alone, with the task's template and verifier.

    Raises ValueError for a task that the recipe lacks, and for a recipe with prompts.tasks that names none.
    """
    name = recipe.evaluation.task or ""
    task = next((task for task in tasks_of(recipe) if task.name == name), None)
    if task is None:
        names = ", ".join(task.name for task in tasks_of(recipe))
        if not names:
            raise ValueError(f"evaluation.task: there is no task {name}: the recipe has no prompts.tasks")
        raise ValueError(f"evaluation.task: expected one of {names}, found {name or 'none'}")
    return task.recipe.with_settings(evaluation={"task": None})


def check_evaluation(recipe: Recipe, files: Sequence[ProblemFile], budgets: Sequence[int] = ()) -> EvaluationInputs:
    """Check a policy's folder, tokenizer and context against the problems; recipe.policy.path is the folder.

    Of a recipe with prompts.tasks, evaluation.task is evaluated.

    Raises ValueError, in one line with key or row, for a task that is missing, an option that vLLM does not know, and
    two files of one name. Raises ValueError for think tags or a phrase that do not survive the tokenizer, and for a
    context that is too short for the longest completion. A prompt longer than prompts.max_prompt_tokens also raises
    ValueError, since a problem that is left out would change the score.
    """
    recipe = recipe_of_task(recipe)
    check_policy(recipe)
    check_options(recipe.engine.vllm)
    hf_config = read_hf_config(recipe.policy.path)
    tokenizer = policy_tokenizer(recipe, hf_config)
    check_weights(recipe.policy.path)
    # If the recipe's prompts are an evaluation file, no row holds messages. Else the rows of the recipe's prompts
    # decide between text and messages, as in training.
    messages = None
    if recipe.prompts.path in [file.path for file in files]:
        messages = False
    recipe = chat_of_recipe(recipe, tokenizer, messages=messages).settled(recipe)
    longest = longest_sequence(at_budget(recipe, max(budgets, default=None)), hf_config, tokenizer)
    recipe = recipe.with_settings(
        engine={"vllm": {"max_model_len": longest, **recipe.engine.vllm}},
        # Neither of these sections changes a completion or the verdict on a completion.
        rewards={"length_penalty": None},
        rollouts={"routing_replay": False},
    )
    return EvaluationInputs(
        recipe=recipe,
        budgets=tuple(budgets) or (None,),
        tokenizer=tokenizer,
        files=tuple(files),
        prompts=rendered(files, tokenizer, recipe, key="--data"),
    )


def evaluation_inputs(recipe: Recipe, tokenizer: Any, training: Sequence[Prompt]) -> EvaluationInputs | None:
    """Read and render the files of the recipe's `evaluation`, and compare the problems with the training prompts.

    None without evaluations. Raises ValueError for wrong files, as `read_problems` and `rendered` do.
    """
    section = recipe.evaluation
    if not section.every_steps:
        return None
    recipe = recipe_of_task(recipe)
    files = tuple(read_problems(*split_schema(text)) for text in section.files)
    prompts = rendered(files, tokenizer, recipe, key="evaluation.files", task=section.task or "")
    texts = [Text(where=prompt.prompt_id, text=prompt.text) for prompt in training]
    return EvaluationInputs(
        recipe=recipe,
        tokenizer=tokenizer,
        files=files,
        prompts=prompts,
        contaminations={file.name: contamination(texts, file.problems) for file in files},
    )


def rendered(
    files: Sequence[ProblemFile], tokenizer: Any, recipe: Recipe, *, key: str, task: str = ""
) -> dict[str, tuple[Prompt, ...]]:
    """File name -> [P] problems of the file, rendered as the recipe's prompts.

    Raises ValueError for two files of one name and for a prompt that is too long. key: the setting or option that
    names the files, for the message.
    """
    limit = recipe.prompts.max_prompt_tokens
    renderer = PromptRenderer(tokenizer, recipe.prompts)
    prompts = {}
    for file in files:
        if file.name in prompts:
            raise ValueError(f"{key}: two files are called {file.name!r}; rename one")
        token_ids = renderer.token_ids([problem.text for problem in file.problems])
        for problem, ids in zip(file.problems, token_ids):
            if len(ids) > limit:
                raise ValueError(
                    f"{problem.where}: the prompt has {len(ids)} tokens, and prompts.max_prompt_tokens allows {limit}"
                )
        prompts[file.name] = tuple(
            Prompt(prompt_id=p.problem_id, text=p.text, answer=p.answer, token_ids=ids, extra=p.extra, task=task)
            for p, ids in zip(file.problems, token_ids)
        )
    return prompts


def settings(recipe: Recipe, *, k: int, budgets: Sequence[int | None]) -> dict[str, Any]:
    """The settings of a recipe that decide the completions and scores of an evaluation, as JSON data.

    vLLM's options for capacity and processes are left out, since these options decide speed alone.
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
    """SHA-256 (hexadecimal) of the names and contents of a Hugging Face folder's files. Raises OSError for an
    unreadable file."""
    # The folder's name is left out, because a moved folder is the same policy.
    folder_hash = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                folder_hash.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return folder_hash.hexdigest()

"""Checks of a recipe that need no GPU, no weights and no data.

The commands `plan`, `prompts`, `submit` and `train` make these checks."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_scalerl.algorithms import algorithm_of
from megatron_scalerl.distributed.device import HAVE_GPU
from megatron_scalerl.engine.options import check_options
from megatron_scalerl.environments.worker import load
from megatron_scalerl.models import family, read_hf_config
from megatron_scalerl.models.family import Family
from megatron_scalerl.plan.counting import trained_family
from megatron_scalerl.plan.verifier_trial import try_verifier
from megatron_scalerl.prompts.chat import chat_of_recipe
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.prompts.tokenizer import load_tokenizer, policy_tokenizer
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import read_run_recipe
from megatron_scalerl.recipe.hub import hint
from megatron_scalerl.recipe.recipe import TEACHER
from megatron_scalerl.recipe.tasks import tasks_of
from megatron_scalerl.rewards.worker import check_verifier
from megatron_scalerl.rollouts.plans import longest_sequence
from megatron_scalerl.trainer.adapter_folder import adapter_reader


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Results of the checks of a recipe's settings. Produced by `check_settings`."""

    recipe: Recipe
    """The recipe with the settings that `chat` fills in."""
    chat: Any
    """The `Chat` that formats prompts for the policy; None without a tokenizer."""
    tokenizer: Any
    """The policy's tokenizer, from transformers; None if only a config.json is available."""
    longest_sequence: int
    """Tokens of the longest prompt with the longest completion, including the forced phrase and the end of sequence.

    Without a tokenizer the length is a lower bound.
    """
    micro_batch_tokens: int
    """Capacity of one packed micro-batch (tokens)."""


def check_settings(recipe: Recipe, config: str | Path | None = None, *, planned: bool = False) -> Settings:
    """Check algorithm, options of vLLM and Megatron, verifiers, environments, thinking tags, templates and lengths.

    config: folder of a config.json that replaces the policy's folder, without a tokenizer. planned: True for a plan,
    on a machine that may lack the environment's modules. Raises ValueError, in one line with the key.
    """
    for task in tasks_of(recipe):
        check_verifier(task.rewards.verifier)
        try_verifier(task)
        try:
            if task.recipe.environment.name is not None:
                load(task.recipe.environment.name)
        except ValueError as problem:
            if not (planned and isinstance(problem.__context__, ModuleNotFoundError)):
                raise
    for name, devices in recipe.engine_devices.items():
        options = recipe.of_engine(name).engine.vllm
        check_options(options)
        product = prod(options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
        if name.startswith(TEACHER) and product != devices:
            raise ValueError(
                f"algorithm.teachers.{name.removeprefix(TEACHER)}.devices: {devices}, and its parallel sizes of vLLM "
                f"multiply to {product}; make them equal by vllm: {{tensor_parallel_size: {devices}}}"
            )
    algorithm_of(recipe)
    hf_config = read_hf_config(config or recipe.policy.path)
    policy = family(hf_config)
    if recipe.adapters_alone and policy.transformer.get("num_moe_experts"):
        raise ValueError(
            "weights.adapters: engines cannot apply adapters of experts; set merged, which merges the adapters into "
            "the weights that are sent"
        )
    if HAVE_GPU and recipe.adapters_alone and (recipe.policy.dtype == "float32" or recipe.rollouts.deterministic):
        raise ValueError(
            "weights.adapters: on GPUs vLLM computes adapters alone in bfloat16 and adds in no fixed order, which "
            "excludes policy.dtype float32 and rollouts.deterministic; set merged"
        )
    megatron = recipe.megatron
    if recipe.policy.lora or megatron.model or megatron.parallel or megatron.ddp or megatron.optimizer:
        # The import is slow, and so is made only if the recipe has adapters or Megatron's options.
        from megatron_scalerl.trainer.options import check_megatron

        check_megatron(policy, recipe)
    if recipe.policy.adapter is not None:
        adapter_reader(recipe.policy, trained_family(recipe, policy))
    tokenizer = chat = None
    if config is None:
        tokenizer = policy_tokenizer(recipe, hf_config)
        _check_second_policy(recipe, policy, tokenizer)
        chat = chat_of_recipe(recipe, tokenizer)
        recipe = chat.settled(recipe)
        for task in tasks_of(recipe):
            # The constructor raises for a template that does not render.
            PromptRenderer(tokenizer, task.prompts)
    capacity = _micro_batch_tokens(recipe)
    longest = longest_sequence(recipe, hf_config, tokenizer, capacity=capacity)
    return Settings(
        recipe=recipe, chat=chat, tokenizer=tokenizer, longest_sequence=longest, micro_batch_tokens=capacity
    )


def _check_second_policy(recipe: Recipe, policy: Family, tokenizer: Any) -> None:
    """Check the second policies: algorithm.kl and the teachers.

    Raises ValueError if a tokenizer's vocabulary, or vocab_size or attention_chunk_size of algorithm.kl, differs from
    the policy's.
    """
    folders = {f"teachers.{name}.path": teacher.path for name, teacher in recipe.algorithm.teachers.items()}
    section = recipe.algorithm.kl
    if section is not None and section.to != "base":
        folders["kl.to"] = section.to
    for key, folder in folders.items():
        if not Path(folder, "config.json").is_file():
            raise ValueError(
                f"algorithm.{key}: {folder} is not a Hugging Face folder: it has no config.json"
                + hint(folder, "model")
            )
        if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"algorithm.{key}: the tokenizer of {folder} has to equal the policy's tokenizer")
    if section is None or section.to == "base":
        return
    second = family(read_hf_config(section.to))
    for name in ("vocab_size", "attention_chunk_size"):
        if getattr(second, name) != getattr(policy, name):
            raise ValueError(
                f"algorithm.kl.to: {name} of {section.to} is {getattr(second, name)}, and the policy's is "
                f"{getattr(policy, name)}; they have to be equal"
            )


def _micro_batch_tokens(recipe: Recipe) -> int:
    """Capacity of a micro-batch (tokens).

    If the recipe sets no capacity, a run that resumes keeps the capacity in the run directory's recipe.yaml.
    """
    if recipe.trainer.micro_batch_tokens is None and Path(recipe.run_dir, "recipe.yaml").exists():
        trainer = read_run_recipe(recipe.run_dir).get("trainer") or {}
        return trainer.get("micro_batch_tokens") or recipe.micro_batch_tokens
    return recipe.micro_batch_tokens

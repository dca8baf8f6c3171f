"""Warm start: supervised training on prompts with completions, by the trainer that later does the RL.

`python -m megatron_scalerl sft RECIPE`. The loss is the cross-entropy per completion token; tokens that an
interruption forces are left out, as in RL (`sft_examples`). Runs in one process, or under torchrun in
several.
"""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from megatron_scalerl.batching.packing import pack
from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.checkpoints.weight_map import check_weights
from megatron_scalerl.distributed.parallel import shutdown_parallel
from megatron_scalerl.losses.inputs import LossInputs, LossOutput, masked, weighted_sum
from megatron_scalerl.losses.reduction import token_weights
from megatron_scalerl.models import read_hf_config
from megatron_scalerl.prompts.chat import chat_of_recipe
from megatron_scalerl.prompts.sft_examples import read_examples
from megatron_scalerl.prompts.tokenizer import policy_tokenizer
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.parallel_layout import MODEL_KEYS
from megatron_scalerl.recipe.sections import OptimizerSection, SftSection
from megatron_scalerl.trainer.checkpoint import save_policy
from megatron_scalerl.trainer.ranks import init_parallel
from megatron_scalerl.trainer.step import make_trainer
from megatron_scalerl.types import Rollout, Sample, StepReport

REPORT_EVERY = 50
"""Steps between two progress lines."""


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """The loss -log pi(token), summed with the token weights."""
    logprobs = masked(inputs.trainer_logprobs, inputs.loss_mask)
    return LossOutput(
        loss=-weighted_sum(logprobs, inputs),
        is_weights=torch.ones_like(logprobs),
        capped=torch.zeros_like(inputs.loss_mask),
    )


def schedule(section: SftSection) -> Callable[[int], float]:
    """Learning rate of a step (from 1): linear warm-up, constant, then linear decay to lr x min_lr_ratio."""
    start = section.decay_from_share * section.steps

    def rate(step: int) -> float:
        if section.warmup_steps and step < section.warmup_steps:
            return section.lr * step / section.warmup_steps
        if step <= start:
            return section.lr
        share = (step - start) / (section.steps - start)
        return section.lr * (1.0 - share * (1.0 - section.min_lr_ratio))

    return rate


def run_sft(recipe: Recipe, out: str | Path, *, report: Callable[[str], None] = print) -> StepReport:
    """Train the recipe's policy on the warm-start examples and write the policy to `out`, a Hugging Face folder.

    `report` gets the rows that were skipped and a progress line every 50 steps. Returns the last step's report.
    Raises ValueError for examples that cannot be read, and for an `out` that exists and is not empty; RuntimeError
    where the trained policy cannot be exported, with the path of the checkpoint that holds the policy.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: it exists and is not an empty folder; name a new or empty folder for the policy")
    recipe = _of_warm_start(recipe)
    check_weights(recipe.policy.path)
    tokenizer = policy_tokenizer(recipe, read_hf_config(recipe.policy.path))
    chat = chat_of_recipe(recipe, tokenizer)
    recipe = chat.settled(recipe)
    examples = read_examples(recipe, tokenizer)
    parallel = init_parallel(recipe)
    if parallel.rank == 0:
        for line in (f"sft: {chat.why}", *examples.lines()):
            report(line)
    trainer = make_trainer(recipe, parallel, loss=cross_entropy, learning_rate=schedule(recipe.sft))
    begin = time.monotonic()
    tokens = 0
    last: StepReport | None = None
    for step, samples in enumerate(_batches(recipe, examples.samples), start=1):
        batches = pack(
            samples,
            step=step,
            dp_size=parallel.dp_size,
            micro_batch_tokens=recipe.micro_batch_tokens,
            pad_multiple=trainer.pad_multiple,
            policy_version=step - 1,
        )
        last = trainer.step(batches[parallel.dp_rank])
        tokens += last.tokens
        if parallel.rank == 0 and (step % REPORT_EVERY == 0 or step == recipe.sft.steps):
            report(_line(last, recipe.sft.steps, tokens / (time.monotonic() - begin)))
    weights = out.with_name(f".{out.name}.weights")
    save_policy(weights, trainer.chunks, parallel)
    shutdown_parallel()
    if parallel.rank == 0:
        _export(weights, out, like=Path(recipe.policy.path))
    assert last is not None
    return last


def _export(weights: Path, out: Path, *, like: Path) -> None:
    """Turn the checkpoint `weights` into the Hugging Face folder `out`; after a failure the checkpoint is kept."""
    if out.exists():
        out.rmdir()
    try:
        to_hf(weights, out, like=like)
    except (ValueError, RuntimeError, OSError) as error:
        command = f"megatron-scalerl convert to-hf {weights} {out} --like {like}"
        raise RuntimeError(f"{error}; the trained weights are kept, export them with: {command}") from error
    shutil.rmtree(weights)


def _of_warm_start(recipe: Recipe) -> Recipe:
    """The recipe with the warm start's optimizer, threads, temperature and world size.

    The world size is torchrun's, or 1. All weights are trained, also in a recipe with adapters. The temperature is 1:
    the rollouts' temperature is for sampling, and the examples were not sampled.
    """
    section = recipe.sft
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    optimizer = OptimizerSection(
        lr=section.lr,
        warmup_steps=section.warmup_steps,
        betas=section.betas,
        eps=section.eps,
        weight_decay=recipe.optimizer.weight_decay,
        clip_grad=recipe.optimizer.clip_grad,
    )
    recipe = recipe.model_copy(update={"optimizer": optimizer}).with_settings(
        trainer={"world_size": world_size, "threads": section.threads},
        rollouts={"temperature": 1.0},
        policy={"lora": None, "adapter": None},
        algorithm={"kl": None, "teachers": {}, "name": "scalerl", "settings": {}},
    )
    # A single process holds the whole policy, however the RL run shards it.
    if world_size == 1:
        model = {key: value for key, value in recipe.megatron.model.items() if key not in MODEL_KEYS}
        recipe = recipe.with_settings(megatron={"parallel": {}, "model": model})
    return recipe


def _batches(recipe: Recipe, examples: Sequence[tuple[tuple[int, ...], Rollout]]) -> Iterator[list[Sample]]:
    """Yield one batch for each step. Every pass over the examples has a new order, drawn with the run's seed."""
    order: list[int] = []
    rng = random.Random(recipe.seed)
    for _ in range(recipe.sft.steps):
        while len(order) < recipe.sft.batch_size:
            order += rng.sample(range(len(examples)), len(examples))
        chosen = [examples[i] for i in order[: recipe.sft.batch_size]]
        del order[: recipe.sft.batch_size]
        [weights] = token_weights([[sum(rollout.loss_mask) for _, rollout in chosen]], "token_mean")
        yield [
            Sample(prompt_token_ids=prompt, rollout=rollout, advantage=1.0, token_weight=weight)
            for (prompt, rollout), weight in zip(chosen, weights)
        ]


def _line(report: StepReport, steps: int, tokens_per_second: float) -> str:
    return (
        f"sft step {report.step}/{steps}  loss {report.loss:.4f}  grad norm {report.grad_norm:.3f}  "
        f"lr {report.learning_rate:.2e}  {tokens_per_second:,.0f} tokens/s"
    )

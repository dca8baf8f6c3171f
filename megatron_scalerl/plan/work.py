"""Assumed completion lengths, and the tokens, FLOPs and seconds of one optimizer step."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_scalerl.models.family import Family
from megatron_scalerl.plan.activations import recompute_of, shape_of
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import Parameters, count, trained_family
from megatron_scalerl.plan.hardware import Gpu
from megatron_scalerl.plan.memory import in_chunk
from megatron_scalerl.plan.sharding import Layout
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.tasks import tasks_of
from megatron_scalerl.record import record

DRAWN = 20_000
"""Number of completion lengths that `assumed_lengths` draws."""


@dataclass(frozen=True)
class Lengths:
    """Completion lengths (tokens), drawn once, from which the simulation samples.

    With an environment a completion is an episode, and the environment replies between two turns.
    """

    tokens: tuple[int, ...]
    """Sampled tokens of each completion."""
    replies: float = 0.0
    """Mean number of replies in an episode."""
    written: float = 0.0
    """Mean number of tokens of all replies in an episode."""
    waiting: float = 0.0
    """Mean number of seconds for which an episode waits for replies."""

    @property
    def mean(self) -> float:
        """Mean length of a completion, without replies."""
        return fmean(self.tokens)

    @property
    def mean_resident(self) -> float:
        """Mean current length of the completions that run at one moment.

        Without replies the mean is E[L^2] / 2 E[L]. Replies are assumed to be spread evenly over an episode.
        """
        return fmean(n * (n + self.written) for n in self.tokens) / (2 * self.mean)

    def quantile(self, share: float) -> int:
        """The length that a `share` of the completions does not exceed."""
        return sorted(self.tokens)[min(len(self.tokens) - 1, int(share * len(self.tokens)))]


def assumed_lengths(recipe: Recipe, assumed: Assumptions) -> Lengths:
    """Completion lengths drawn from the assumptions.

    Each turn has log-normal thinking, interrupted as in the recipe, and a log-normal answer within its budget. Each
    task of a mixture has a share of the completions, by the task's weight.
    """
    rng = random.Random(0)
    tasks = tasks_of(recipe)
    total_weight = sum(task.weight for task in tasks)
    tokens = []
    replies = 0.0
    written = 0.0
    for task in tasks:
        share = task.weight / total_weight
        environment = task.recipe.environment
        turns = min(assumed.turns, environment.max_turns) if environment.name else 1.0
        limit = task.recipe.max_completion_tokens
        written_by_task = min((turns - 1) * assumed.reply_tokens, limit - 1)
        replies += share * (turns - 1)
        written += share * written_by_task
        for number in range(round(share * DRAWN)):
            # Every episode has a whole number of turns. The mean over episodes is `turns`.
            count = int((number + 1) * turns) - int(number * turns)
            sampled = sum(_turn_tokens(task.recipe, assumed, rng) for _ in range(count))
            tokens.append(min(sampled, int(limit - written_by_task)))
    return Lengths(tuple(tokens), replies, written, replies * assumed.reply_seconds)


def _turn_tokens(recipe: Recipe, assumed: Assumptions, rng: random.Random) -> int:
    """Draw the number of tokens of a turn. recipe: the recipe of the turn's task."""
    section = recipe.interruption
    lower_bound, upper_bound = section.thinking_tokens
    thinking = rng.lognormvariate(math.log(assumed.thinking_median * upper_bound), assumed.thinking_sigma)
    answer_median = max(1.0, assumed.answer_median * section.answer_tokens)
    answer = min(rng.lognormvariate(math.log(answer_median), 0.5), section.answer_tokens)
    if section.enabled:
        thinking = min(thinking, rng.randint(lower_bound, upper_bound))
    return int(max(1.0, min(thinking + answer, recipe.environment.turn_tokens or math.inf)))


@record
class StepWork:
    """The work of an optimizer step."""

    completions: int
    generated_tokens: float
    trained_tokens: float
    """Number of tokens of prompts, completions and replies in a batch."""
    model_flops: float
    """FLOPs of the forward and backward pass, without recomputation."""
    hardware_flops: float
    """FLOPs including recomputation: of layers, and of logits whose loss is not computed in chunks."""
    micro_batches: float
    """Number of micro-batches per data-parallel rank."""
    bubble: float
    """Pipeline bubble as a share of the compute time."""
    train_seconds: float


@record
class TokenFlops:
    """FLOPs per token, as means over all tokens."""

    body: float
    """FLOPs of the forward pass of the layers."""
    recomputation: float
    """FLOPs of the recomputation of the layers."""
    head: float
    """FLOPs of the forward pass of the logit projection. The embedding has no FLOPs."""
    frozen: float
    """FLOPs saved by frozen weights, which need no gradients, minus the FLOPs of the adapters' gradients."""

    @property
    def model(self) -> float:
        """FLOPs of the forward and backward pass, without recomputation."""
        return 3 * (self.body + self.head) - self.frozen

    def hardware(self, recipe: Recipe) -> float:
        """FLOPs of the forward and backward pass, including recomputation.

        Layers are recomputed as the recipe sets, and logits if the loss is not computed in chunks. A second policy
        (algorithm.kl) counts as a forward pass of an equally large policy.
        """
        if recipe.algorithm.kl is not None:
            return self.model + self.recomputation + self.body + self.head
        if in_chunk(recipe):
            return self.model + self.recomputation
        # Logits are computed again for the backward pass if the loss is not computed in chunks.
        return self.model + self.recomputation + self.head


def step_work(
    recipe: Recipe, family: Family, p: Parameters, layout: Layout, gpu: Gpu, lengths: Lengths, assumed: Assumptions
) -> StepWork:
    """The trainer's work in a step, and its time at the assumed utilization."""
    completions = recipe.rollouts.groups_per_batch * recipe.rollouts.group_size
    generated = completions * lengths.mean
    context = assumed.prompt_tokens + lengths.written
    trained = assumed.kept_share * (generated + completions * context)
    flops = token_flops(recipe, family, layout, [n + context for n in lengths.tokens])
    utilization = assumed.dense_utilization
    if p.experts:
        utilization = assumed.moe_utilization
    hardware = trained * flops.hardware(recipe)
    micro_batches = max(1.0, trained / layout.dp / (recipe.micro_batch_tokens * assumed.packing))
    # Interleaved chunks shorten the pipeline's ramp (Narayanan et al. 2021).
    bubble = (layout.pp - 1) / (micro_batches * layout.chunks)
    train_seconds = assumed.train_seconds
    if train_seconds is None:
        train_seconds = hardware / (layout.world_size * gpu.bf16_flops * utilization) * (1 + bubble)
    return StepWork(
        completions=completions,
        generated_tokens=generated,
        trained_tokens=trained,
        model_flops=trained * flops.model,
        hardware_flops=hardware,
        micro_batches=micro_batches,
        bubble=bubble,
        train_seconds=train_seconds,
    )


def token_flops(recipe: Recipe, family: Family, layout: Layout, sizes: Sequence[float]) -> TokenFlops:
    """FLOPs per token with causal attention. sizes: lengths of the sequences (tokens), prompts included."""
    recompute = recompute_of(recipe)
    chunk = family.attention_chunk_size
    # The mean length of the sequence to which a token belongs. A token attends to half of the sequence on average, at
    # 2 FLOPs per key and width.
    mean_length = fmean(n * n for n in sizes) / fmean(sizes)
    chunked_length = mean_length
    if chunk:
        chunked_length = fmean(n * min(n, chunk) for n in sizes) / fmean(sizes)
    body = recomputation = matrices = 0.0
    for place, style in zip(layout.places, family.layers):
        shape = shape_of(family, style)
        projections = 2 * shape.projections
        keys = chunked_length if style.chunked else mean_length
        core = (shape.query + shape.out) * keys
        # SwiGLU has three matrices, at 2 FLOPs per weight; the router scores all experts.
        mlp = 6 * shape.hidden * (shape.ffn + shape.top_k * shape.expert_ffn) + 2 * shape.hidden * shape.experts
        body += projections + core + mlp
        matrices += projections + mlp
        if recompute.granularity == "full" and (recompute.method == "uniform" or place < recompute.layers):
            recomputation += projections + core + mlp
        if "core_attn" in recompute.modules:
            recomputation += core
        mlp_module = "moe" if style.moe else "mlp"
        if mlp_module in recompute.modules:
            recomputation += mlp
        elif style.moe and "shared_experts" in recompute.modules:
            recomputation += 6 * shape.hidden * shape.ffn
    head = 2.0 * family.transformer["hidden_size"] * family.vocab_size
    frozen = 0.0
    if recipe.policy.lora is not None:
        frozen = matrices + head - 6 * count(trained_family(recipe, family)).active
    return TokenFlops(body=body, recomputation=recomputation, head=head, frozen=frozen)

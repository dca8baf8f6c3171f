"""Tokens, FLOPs and seconds of one optimiser step, and what one weight update costs on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_scalerl.models.family import Family
from megatron_scalerl.plan.activations import recompute_of, shape_of
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import Parameters
from megatron_scalerl.plan.hardware import Gpu
from megatron_scalerl.plan.layout import Layout
from megatron_scalerl.plan.lengths import Lengths
from megatron_scalerl.plan.logit_memory import in_chunk
from megatron_scalerl.plan.memory import WIDTH
from megatron_scalerl.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One optimiser step."""

    completions: int
    generated_tokens: float
    trained_tokens: float
    """Prompts and completions that the trainer computes."""
    model_flops: float
    """Forward and backward, each weight once."""
    hardware_flops: float
    """With what is computed again: layers under recompute, logits where the loss is not taken with them."""
    micro_batches: float
    """Of one data-parallel rank."""
    bubble: float
    """Idle share that the pipeline adds to the compute time."""
    train_seconds: float


@dataclass(frozen=True, kw_only=True)
class UpdateBound:
    """Seconds that one weight update takes at least, by how it is sent."""

    way: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """FLOPs a token, mean over all tokens."""

    body: float
    """Layers, forward."""
    again: float
    """Layers, what recompute adds."""
    head: float
    """Logit projection, forward; the embedding costs none."""

    @property
    def model(self) -> float:
        """Forward and backward, each weight once."""
        return 3 * (self.body + self.head)

    def hardware(self, recipe: Recipe) -> float:
        """Forward and backward with what is computed again: layers under recompute, logits outside a chunk's loss."""
        return 3 * self.body + self.again + (3 if in_chunk(recipe) else 4) * self.head


def step_work(
    recipe: Recipe, family: Family, p: Parameters, layout: Layout, gpu: Gpu, lengths: Lengths, assumed: Assumptions
) -> StepWork:
    """What the trainer computes in one step, and how long it takes at the assumed utilisation."""
    completions = recipe.rollouts.groups_per_batch * recipe.rollouts.group_size
    generated = completions * lengths.mean
    trained = assumed.kept_share * (generated + completions * assumed.prompt_tokens)
    flops = token_flops(recipe, family, [n + assumed.prompt_tokens for n in lengths.tokens])
    utilisation = assumed.moe_utilisation if p.experts else assumed.dense_utilisation
    hardware = trained * flops.hardware(recipe)
    micro_batches = max(1.0, trained / layout.dp / (recipe.micro_batch_tokens * assumed.packing))
    bubble = (layout.pp - 1) / (micro_batches * layout.chunks)
    computed = hardware / (layout.world_size * gpu.bf16_flops * utilisation) * (1 + bubble)
    return StepWork(
        completions=completions,
        generated_tokens=generated,
        trained_tokens=trained,
        model_flops=trained * flops.model,
        hardware_flops=hardware,
        micro_batches=micro_batches,
        bubble=bubble,
        train_seconds=computed if assumed.train_seconds is None else assumed.train_seconds,
    )


def token_flops(recipe: Recipe, family: Family, sizes: Sequence[float]) -> TokenFlops:
    """FLOPs a token of sequences of these sizes (tokens, prompts included); attention is causal."""
    recompute = recompute_of(recipe)
    chunk = family.attention_chunk_size
    whole = fmean(n * n for n in sizes) / fmean(sizes)
    cut = fmean(n * min(n, chunk) for n in sizes) / fmean(sizes) if chunk else whole
    body = again = 0.0
    for index, style in enumerate(family.layers):
        shape = shape_of(family, style)
        projections = 2 * shape.hidden * (2 * shape.query + 2 * shape.key)
        core = 2 * shape.query * (cut if style.chunked else whole)
        mlp = 6 * shape.hidden * (shape.ffn + shape.top_k * shape.expert_ffn) + 2 * shape.hidden * shape.experts
        body += projections + core + mlp
        if recompute.granularity == "full":
            again += projections + core + mlp if recompute.method == "uniform" or index < recompute.layers else 0
        again += core if "core_attn" in recompute.modules else 0
        again += mlp if ("moe" if style.moe else "mlp") in recompute.modules else 0
    return TokenFlops(body=body, again=again, head=2.0 * family.transformer["hidden_size"] * family.vocab_size)


def update_bytes(recipe: Recipe, p: Parameters) -> int:
    """Bytes of one weight update: every exported weight once."""
    return p.total * WIDTH[recipe.policy.dtype]


def update_bounds(size: int, gpu: Gpu) -> tuple[UpdateBound, ...]:
    """Lower bounds of one update: bytes over the rate of the narrowest link, nothing else."""
    node = gpu.per_node * gpu.nic_bytes_per_second
    return (
        UpdateBound(way="one sender through its own network card", seconds=size / gpu.nic_bytes_per_second),
        UpdateBound(way=f"striped over a node's {gpu.per_node} cards", seconds=size / node),
        UpdateBound(way="NVLink inside one machine", seconds=size / gpu.nvlink_bytes_per_second),
    )


def publish_seconds(size: int, gpu: Gpu, assumed: Assumptions) -> float:
    """Engines' pause for one update as assumed: one sender's card at half its rate."""
    if assumed.publish_seconds is not None:
        return assumed.publish_seconds
    return 2 * size / gpu.nic_bytes_per_second

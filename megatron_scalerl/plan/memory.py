"""Memory of one trainer rank at its peak: what stays, what a micro-batch adds.

Bytes a parameter with Megatron's distributed optimizer over d ranks, fp32 gradients: bf16 weights 2 + 4 + 12/d,
fp32 weights 4 + 4 + 8/d (they are their own main weights). The peak comes in the backward pass, when all saved
activations are there and one more thing is worked on: the logits, or one layer's recomputation and gradients. The
optimizer steps in place, PyTorch's AdamW too, which is a fused one on GPUs. Without Transformer Engine (and apex)
clipping scales one gradient after another into an fp32 copy: the largest is the peak where activations are few.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_scalerl.models.family import Family
from megatron_scalerl.plan import activations
from megatron_scalerl.plan.activations import Recompute, norm_bytes
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import RankParameters, of_stage
from megatron_scalerl.plan.hardware import GIB, MIB
from megatron_scalerl.plan.kernels import PLAIN_ON_GPU, Kernels
from megatron_scalerl.plan.layout import Layout
from megatron_scalerl.plan.logit_memory import logit_bytes
from megatron_scalerl.recipe import Recipe

WIDTH = {"float32": 4, "bfloat16": 2}
CPU_RUNTIME_BYTES = 72 * MIB
"""Code pages, thread pools and kernels that a CPU process gains by its first step (measured, machine A)."""
CPU_KERNEL_CACHE_BYTES = 256 * MIB
"""oneDNN keeps a bf16 kernel for each of its last 1,024 shapes; experts bring new shapes at every call (measured)."""
_NOT_COUNTED = ("optimizer_cpu_offload", "use_precision_aware_optimizer")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of a memory table."""

    name: str
    bytes: float
    moving: bool = False
    """Comes and goes with a micro-batch: what `Assumptions.fragmentation` is a share of."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The peak of the ranks of one pipeline stage."""

    stage: int
    parameters: RankParameters
    terms: tuple[Term, ...]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(term.bytes for term in self.terms)


def trainer_memory(
    recipe: Recipe,
    family: Family,
    layout: Layout,
    assumed: Assumptions,
    *,
    kernels: Kernels,
    micro_batches: int = 2**30,
) -> tuple[RankMemory, ...]:
    """The peak of each pipeline stage. Raises ValueError for options that are not counted.

    `micro_batches` a step bounds what a pipeline holds in flight.
    """
    if kernels == PLAIN_ON_GPU:
        _check_attention(recipe, family, layout)
    for key in _NOT_COUNTED:
        if recipe.megatron.optimizer.get(key):
            raise ValueError(f"megatron.optimizer.{key}: expected false, the planner does not count it")
    return tuple(
        _stage_memory(recipe, family, layout, assumed, kernels, micro_batches, stage) for stage in range(layout.pp)
    )


def _check_attention(recipe: Recipe, family: Family, layout: Layout) -> None:
    """Raises ValueError where PyTorch's attention has no kernel on a GPU that keeps no scores.

    Its memory-efficient one, the only one for fp32, knows no grouped queries; its flash kernel knows no masks, which
    context parallelism needs.
    """
    t = family.transformer
    if layout.cp > 1:
        raise ValueError(
            "megatron.parallel.context_parallel_size: expected 1 with plain layers on a GPU (the planner does not "
            f"count attention with masks there), found {layout.cp}"
        )
    if recipe.policy.dtype == "float32" and t["num_query_groups"] != t["num_attention_heads"]:
        raise ValueError(
            "policy.dtype: expected bfloat16 with plain layers and grouped queries on a GPU (the planner does not "
            "count the scores that PyTorch's attention keeps there), found float32"
        )


def _stage_memory(
    recipe: Recipe,
    family: Family,
    layout: Layout,
    assumed: Assumptions,
    kernels: Kernels,
    micro_batches: int,
    stage: int,
) -> RankMemory:
    p = of_stage(family, layout, stage)
    static = _static(recipe, layout, p)
    saved, layer_work = _activations(recipe, family, layout, assumed, kernels, micro_batches, stage)
    stays, logits = 0.0, 0.0
    if stage == layout.pp - 1:
        stays, logits = logit_bytes(recipe, family, layout, tokens_of(recipe, layout), kernels=kernels)
    work = max(logits, layer_work)
    moving = saved + stays + work
    if kernels.device == "cpu":
        cache = CPU_KERNEL_CACHE_BYTES if p.expert and recipe.policy.dtype == "bfloat16" else 0
        rest = Term(name="runtime", bytes=CPU_RUNTIME_BYTES + cache)
    else:
        loss = assumed.fragmentation * moving
        rest = Term(name="CUDA, NCCL, fragmentation", bytes=assumed.runtime_gib * GIB + loss)
    terms = (
        *static,
        Term(name="saved activations", bytes=saved, moving=True),
        Term(name="gradients of the logits' inputs", bytes=stays, moving=True),
        Term(name="logit workspace" if logits > layer_work else "one layer's work", bytes=work, moving=True),
        rest,
    )
    if kernels == PLAIN_ON_GPU:  # what moves has been given back before gradients are clipped
        terms += (Term(name="clipping above that", bytes=max(0.0, 4 * p.largest - moving)),)
    return RankMemory(stage=stage, parameters=p, terms=terms)


def tokens_of(recipe: Recipe, layout: Layout) -> int:
    """Tokens of a full micro-batch on one context-parallel rank."""
    return -(-recipe.micro_batch_tokens // layout.cp)


def _static(recipe: Recipe, layout: Layout, p: RankParameters) -> tuple[Term, ...]:
    width = WIDTH[recipe.policy.dtype]
    grad = 4 if recipe.megatron.ddp.get("grad_reduce_in_fp32", True) else width
    sharded = p.dense / layout.dense_shards + p.expert / layout.expert_shards  # whose optimizer state is this rank's
    main = 4 if width == 2 else 0
    return (
        Term(name="weights", bytes=width * p.total),
        Term(name="gradients", bytes=grad * p.total),
        Term(name="main weights (fp32)", bytes=main * sharded),
        Term(name="Adam moments", bytes=8 * sharded),
    )


def _activations(
    recipe: Recipe,
    family: Family,
    layout: Layout,
    assumed: Assumptions,
    kernels: Kernels,
    micro_batches: int,
    stage: int,
) -> tuple[float, float]:
    """(saved, the most that one layer needs on top), bytes."""
    width, tokens = WIDTH[recipe.policy.dtype], tokens_of(recipe, layout)
    recompute = activations.recompute_of(recipe)
    layers = layout.stages[stage]
    saved, work = [], [0.0]
    for index, layer in enumerate(layers):
        style = family.layers[layer]
        shape = activations.shape_of(family, style)
        whole = activations.layer_bytes(
            shape, layout, width=width, kernels=kernels, imbalance=assumed.expert_imbalance
        )
        setting = _setting_of(recompute, index)
        per_token = activations.kept(whole, setting, moe=style.moe, width=width, hidden=shape.hidden / layout.sp)
        if setting.granularity == "full" and setting.method == "uniform" and index % setting.layers:
            per_token = 0.0
        redone = whole.total * (setting.layers if setting.method == "uniform" else 1)
        again = redone if setting.granularity == "full" else whole.total - per_token
        saved.append(per_token)
        work.append(
            again + activations.backward_bytes(shape, layout, width=width, imbalance=assumed.expert_imbalance)
        )
    in_flight = layout.layers_in_flight(stage, micro_batches) / max(1, len(layers))
    ends = _ends(family, layout, width, kernels, stage)
    return tokens * (sum(saved) * in_flight + ends), tokens * max(work)


def _setting_of(recompute: Recompute, index: int) -> Recompute:
    """Of the stage's layer `index`: with the method "block" only the first layers are recomputed."""
    if recompute.granularity == "full" and recompute.method == "block" and index >= recompute.layers:
        return Recompute(granularity="none")
    return recompute


def _ends(family: Family, layout: Layout, width: int, kernels: Kernels, stage: int) -> float:
    """Bytes a token before the first and after the last layer."""
    hidden = family.transformer["hidden_size"]
    norm = norm_bytes(hidden, width=width, kernels=kernels)
    if kernels.device == "gpu" and layout.sp > 1:
        norm += hidden * width  # its output, from which the row below is gathered
    head = norm / layout.sp + hidden * width + 8  # the head's input is the whole row
    return (head if stage == layout.pp - 1 else 0) + (8 if stage == 0 else 0)

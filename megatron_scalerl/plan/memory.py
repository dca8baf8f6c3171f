"""Peak memory of one trainer rank: static memory, activations, workspaces.

Bytes per parameter with Megatron's distributed optimizer over d ranks, fp32 gradients: bf16 weights 2 + 4 + 12/d,
fp32 weights 4 + 4 + 8/d (they are their own main weights). The peak is in the backward pass, when all saved
activations are allocated and in addition either the logits or the recomputation and gradients of one layer. The
optimizer steps in place, including PyTorch's AdamW, which is fused on GPUs. Without Transformer Engine and apex,
clipping copies one gradient after another to fp32: with few activations the copy of the largest one is the peak.
"""

from megatron_scalerl.logits.choice import workspace_mb
from megatron_scalerl.logits.torch_backend import LARGEST, LARGEST_CHUNK, TILE
from megatron_scalerl.losses import is_separable
from megatron_scalerl.models.family import Family, padded_vocab_size
from megatron_scalerl.plan import activations
from megatron_scalerl.plan.activations import Recompute, norm_bytes
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import RankParameters, of_stage
from megatron_scalerl.plan.hardware import GIB, MIB, PLAIN_ON_GPU, Kernels
from megatron_scalerl.plan.sharding import Layout
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record

WIDTH = {"float32": 4, "bfloat16": 2}
CPU_RUNTIME_BYTES = 72 * MIB
"""Code pages, thread pools and kernels that a CPU process has added after its first step (measured, machine A)."""
CPU_KERNEL_CACHE_BYTES = 256 * MIB
"""oneDNN caches a bf16 kernel for each of its last 1,024 shapes; experts have new shapes in every call (measured)."""
_CAST_COLUMNS = 4096
"""Columns of the head that a CPU casts to fp32 at once."""
_NOT_COUNTED = ("optimizer_cpu_offload", "use_precision_aware_optimizer")


@record
class Term:
    """One row of a memory table."""

    name: str
    bytes: float
    moving: bool = False
    """Allocated and freed with a micro-batch: `Assumptions.fragmentation` is a share of this memory."""


@record
class RankMemory:
    """Peak memory of the ranks of one pipeline stage."""

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
    group_bytes: float = 0.0,
) -> tuple[RankMemory, ...]:
    """Peak memory of each pipeline stage. Raises ValueError for unsupported options.

    micro_batches: per step; bounds the micro-batches in flight in a pipeline. group_bytes: of the broadcast groups
    that send weights.
    """
    if kernels == PLAIN_ON_GPU:
        _check_attention(recipe, family, layout)
    for key in _NOT_COUNTED:
        if recipe.megatron.optimizer.get(key):
            raise ValueError(f"megatron.optimizer.{key}: expected false, the planner does not support it")
    return tuple(
        _stage_memory(recipe, family, layout, assumed, kernels, micro_batches, stage, group_bytes)
        for stage in range(layout.pp)
    )


def _check_attention(recipe: Recipe, family: Family, layout: Layout) -> None:
    """Raises ValueError if PyTorch has no attention kernel on a GPU that avoids saving the scores.

    Its memory-efficient kernel, the only one for fp32, does not support grouped queries; its flash kernel does not
    support masks, which context parallelism requires.
    """
    t = family.transformer
    if layout.cp > 1:
        raise ValueError(
            "megatron.parallel.context_parallel_size: expected 1 with plain layers on a GPU (the planner does not "
            f"support attention with masks there), found {layout.cp}"
        )
    if recipe.policy.dtype == "float32" and t["num_query_groups"] != t["num_attention_heads"]:
        raise ValueError(
            "policy.dtype: expected bfloat16 with plain layers and grouped queries on a GPU (the planner does not "
            "count the scores that PyTorch's attention saves there), found float32"
        )


def _stage_memory(
    recipe: Recipe,
    family: Family,
    layout: Layout,
    assumed: Assumptions,
    kernels: Kernels,
    micro_batches: int,
    stage: int,
    group_bytes: float,
) -> RankMemory:
    p = of_stage(family, layout, stage)
    width = WIDTH[recipe.policy.dtype]
    gradient = 4 if recipe.megatron.ddp.get("grad_reduce_in_fp32", True) else width
    # parameters whose optimizer state this rank holds
    sharded = p.dense / layout.dense_shards + p.expert / layout.expert_shards
    saved, layer_work = _activations(recipe, family, layout, assumed, kernels, micro_batches, stage)
    stays, logits = 0.0, 0.0
    if stage == layout.pp - 1:
        stays, logits = logit_bytes(recipe, family, layout, tokens_of(recipe, layout), kernels=kernels)
    work = max(logits, layer_work)
    moving = saved + stays + work
    if kernels.device == "cpu":
        cache = CPU_KERNEL_CACHE_BYTES if p.expert and width == 2 else 0
        rest = Term(name="runtime", bytes=CPU_RUNTIME_BYTES + cache)
    else:
        loss = assumed.fragmentation * moving
        rest = Term(name="CUDA, NCCL, fragmentation", bytes=assumed.runtime_gib * GIB + loss)
    terms = [
        Term(name="weights", bytes=width * p.total),
        Term(name="gradients", bytes=gradient * p.total),
        Term(name="main weights (fp32)", bytes=(4 if width == 2 else 0) * sharded),
        Term(name="Adam moments", bytes=8 * sharded),
        Term(name="saved activations", bytes=saved, moving=True),
        Term(name="logit input gradients", bytes=stays, moving=True),
        Term(name="logit workspace" if logits > layer_work else "layer workspace", bytes=work, moving=True),
        rest,
        Term(name="weight groups (NCCL)", bytes=group_bytes),
    ]
    if kernels == PLAIN_ON_GPU:  # temporary memory is freed before gradients are clipped
        terms.append(Term(name="gradient clipping copy", bytes=max(0.0, 4 * p.largest - moving)))
    return RankMemory(stage=stage, parameters=p, terms=tuple(terms))


def tokens_of(recipe: Recipe, layout: Layout) -> int:
    """Tokens of a full micro-batch on one context-parallel rank."""
    return -(-recipe.micro_batch_tokens // layout.cp)


def _activations(
    recipe: Recipe,
    family: Family,
    layout: Layout,
    assumed: Assumptions,
    kernels: Kernels,
    micro_batches: int,
    stage: int,
) -> tuple[float, float]:
    """(saved activations, largest workspace of one layer), bytes."""
    width, tokens = WIDTH[recipe.policy.dtype], tokens_of(recipe, layout)
    recompute = activations.recompute_of(recipe)
    layers = layout.stages[stage]
    saved, work = [], [0.0]
    for layer in layers:
        index, style = layout.places[layer], family.layers[layer]
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
    """For layer `index` of a model chunk: the method "block" recomputes only the first layers."""
    if recompute.granularity == "full" and recompute.method == "block" and index >= recompute.layers:
        return Recompute(granularity="none")
    return recompute


def _ends(family: Family, layout: Layout, width: int, kernels: Kernels, stage: int) -> float:
    """Bytes per token saved before the first and after the last layer."""
    hidden = family.transformer["hidden_size"]
    norm = norm_bytes(hidden, width=width, kernels=kernels)
    if kernels.device == "gpu" and layout.sp > 1:
        norm += hidden * width  # its output, from which the head's input is gathered
    head = norm / layout.sp + hidden * width + 8  # the head's input is not sequence-parallel
    return (head if stage == layout.pp - 1 else 0) + (8 if stage == 0 else 0)


def in_chunk(recipe: Recipe) -> bool:
    """True if the loss is computed in the chunks of the logits, which are then computed once."""
    return recipe.trainer.loss_in_chunk and is_separable(recipe.loss.name)


def logit_bytes(
    recipe: Recipe, family: Family, layout: Layout, tokens: int, *, kernels: Kernels
) -> tuple[float, float]:
    """(gradients kept until the backward pass, workspace of the logit projection), bytes.

    trainer.logit_workspace_mb bounds the workspace. A GPU uses all of it, a CPU blocks of at most 2^25 elements.
    """
    hidden = family.transformer["hidden_size"]
    rows = padded_vocab_size(family.vocab_size, layout.tp) // layout.tp
    narrow = recipe.policy.dtype == "bfloat16"
    stays = 4 * tokens * hidden + (4 * rows * hidden if in_chunk(recipe) else 0)
    kept = (2 if narrow else 4) * tokens * hidden  # the tokens with loss, selected
    stated, shared = recipe.trainer.logit_workspace_mb, recipe.engine.colocate
    limit = workspace_mb(stated, large_gpu=kernels.device == "gpu", shared=shared) * MIB
    if kernels.device == "gpu":
        return stays, kept + limit
    stay = rows * tokens <= LARGEST_CHUNK and 4 * rows * tokens <= limit  # until the backward pass
    numbers = min(LARGEST_CHUNK if in_chunk(recipe) or stay else LARGEST, rows * tokens)
    block = numbers * 4 + 8 * TILE
    if narrow:
        chunk = numbers / rows
        block += 4 * chunk * hidden + 8 * min(rows, _CAST_COLUMNS) * hidden
        block += 2 * numbers * (recipe.trainer.logit_gradient == "bf16x2")
    return stays, kept + min(limit, block)

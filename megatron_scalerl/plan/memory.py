"""Peak memory of one trainer rank: static memory, activations, workspaces.

Bytes per parameter with Megatron's distributed optimizer over d ranks, as weight + fp32 gradient + optimizer state:
2 + 4 + 12/d for bf16 weights, 4 + 4 + 8/d for fp32 weights (which serve as main weights), and 2 or 4 for weights that
adapters freeze. The peak is in the
backward pass, when all saved activations are allocated and in addition either the logits or the recomputation and
gradients of one layer. The optimizer steps in place, including PyTorch's AdamW, which is fused on GPUs. Without
Transformer Engine and apex, clipping copies one gradient after another to fp32: with few activations the copy of the
largest gradient is the peak.
"""

from dataclasses import replace

from megatron_scalerl.algorithms import algorithm_of
from megatron_scalerl.logits.choice import workspace_mb
from megatron_scalerl.logits.torch_backend import LARGEST, LARGEST_CHUNK, TILE
from megatron_scalerl.models.family import Family, padded_vocab_size
from megatron_scalerl.plan import activations
from megatron_scalerl.plan.activations import Recompute, norm_bytes
from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import RankParameters, load_family, of_stage, trained_family
from megatron_scalerl.plan.hardware import GIB, MIB, PLAIN_ON_GPU, Kernels
from megatron_scalerl.plan.sharding import Layout, layout_of
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record

WIDTH = {"float32": 4, "bfloat16": 2}
CPU_RUNTIME_BYTES = 72 * MIB
"""Bytes of the code pages, thread pools and kernels that a CPU process has added after its first step (measured on
machine A of docs/measurements.md)."""
CPU_KERNEL_CACHE_BYTES = 256 * MIB
"""Measured bytes of oneDNN's cache, which keeps a bf16 kernel for each of the last 1,024 shapes of matrices. A policy
with experts fills the cache, because experts have new shapes in every call."""
_CAST_COLUMNS = 4096
"""Number of columns of the logit projection's weight that a CPU casts to fp32 at once."""
_NOT_COUNTED = ("optimizer_cpu_offload", "use_precision_aware_optimizer")


@record
class Term:
    """A row of a memory table."""

    name: str
    bytes: float
    moving: bool = False
    """Whether every micro-batch allocates and frees the memory. Only such memory is counted for fragmentation."""


@record
class RankMemory:
    """Peak memory of the ranks of one pipeline stage."""

    stage: int
    parameters: RankParameters
    terms: tuple[Term, ...]

    @property
    def total(self) -> float:
        """Bytes of all terms."""
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
    """Peak memory of each pipeline stage. Raises ValueError for options whose memory the planner cannot count.

    micro_batches: number per step, which bounds the micro-batches in flight in a pipeline. group_bytes: buffers of
    the broadcast groups over which a rank sends weights.
    """
    if kernels == PLAIN_ON_GPU:
        _check_attention(recipe, family, layout)
    for key in _NOT_COUNTED:
        if recipe.megatron.optimizer.get(key):
            raise ValueError(f"megatron.optimizer.{key}: the planner does not support this option; leave it out")
    return tuple(
        _stage_memory(recipe, family, layout, assumed, kernels, micro_batches, stage, group_bytes)
        for stage in range(layout.pp)
    )


def _check_attention(recipe: Recipe, family: Family, layout: Layout) -> None:
    """Raise ValueError if PyTorch has no attention kernel on a GPU that avoids saving the scores.

    The memory-efficient kernel, the only fp32 kernel, does not support grouped queries; the flash kernel does not
    support masks, which context parallelism requires.
    """
    t = family.transformer
    if layout.cp > 1:
        raise ValueError(
            f"megatron.parallel.context_parallel_size: the planner does not support {layout.cp} with plain layers "
            "on a GPU, where attention needs masks; set it to 1"
        )
    if recipe.policy.dtype == "float32" and t["num_query_groups"] != t["num_attention_heads"]:
        raise ValueError(
            "policy.dtype: the planner does not count the scores that PyTorch's attention saves in float32 with "
            "plain layers and grouped queries on a GPU; set bfloat16"
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
    trained = p
    if recipe.policy.lora is not None:
        trained = of_stage(trained_family(recipe, family), layout, stage)
        p = replace(p, dense=p.dense + trained.dense, expert=p.expert + trained.expert)
    width = WIDTH[recipe.policy.dtype]
    gradient = width
    if recipe.megatron.ddp.get("grad_reduce_in_fp32", True):
        gradient = 4
    # Parameters whose optimizer state this rank holds.
    sharded = trained.dense / layout.dense_shards + trained.expert / layout.expert_shards
    saved, layer_work = _activations(recipe, family, layout, assumed, kernels, micro_batches, stage)
    stays = 0.0
    logits = 0.0
    if stage == layout.pp - 1:
        stays, logits = logit_bytes(recipe, family, layout, tokens_of(recipe, layout), kernels=kernels)
    # The largest logits and the largest recomputation of a layer are not allocated together, so the larger counts.
    work = max(logits, layer_work)
    workspace = "logit workspace" if logits > layer_work else "layer workspace"
    moving = saved + stays + work
    main_weights = 4 * sharded
    if width == 4:
        main_weights = 0.0  # fp32 weights serve as main weights
    if kernels.device == "cpu":
        runtime = CPU_RUNTIME_BYTES
        if p.expert and width == 2:
            runtime += CPU_KERNEL_CACHE_BYTES
        runtime_term = Term(name="runtime", bytes=runtime)
    else:
        loss = assumed.fragmentation * moving
        runtime_term = Term(name="CUDA, NCCL, fragmentation", bytes=assumed.runtime_gib * GIB + loss)
    terms = [
        Term(name="weights", bytes=width * p.total),
        Term(name="gradients", bytes=gradient * trained.total),
        Term(name="main weights (fp32)", bytes=main_weights),
        Term(name="Adam moments", bytes=8 * sharded),
        Term(name="saved activations", bytes=saved, moving=True),
        Term(name="logit input gradients", bytes=stays, moving=True),
        Term(name=workspace, bytes=work, moving=True),
        runtime_term,
        Term(name="weight groups (NCCL)", bytes=group_bytes),
    ]
    second = recipe.algorithm.kl
    if second is not None and second.to != "base":
        frozen_family = load_family(second.to)
        frozen = of_stage(frozen_family, layout_of(recipe, frozen_family, layout.world_size), stage)
        terms.append(Term(name="frozen policy (algorithm.kl)", bytes=width * frozen.total))
    # An fp32 copy of a gradient raises the peak only if larger than temporary memory, which is freed before clipping.
    if kernels == PLAIN_ON_GPU:
        terms.append(Term(name="gradient clipping copy", bytes=max(0.0, 4 * trained.largest - moving)))
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
    """(bytes of saved activations, bytes of the largest workspace of one layer) on a rank of the stage."""
    width = WIDTH[recipe.policy.dtype]
    tokens = tokens_of(recipe, layout)
    recompute = activations.recompute_of(recipe)
    layers = layout.stages[stage]
    saved = []
    work = [0.0]
    for layer in layers:
        index = layout.places[layer]
        style = family.layers[layer]
        shape = activations.shape_of(family, style)
        layer_bytes = activations.layer_bytes(
            shape, layout, width=width, kernels=kernels, imbalance=assumed.expert_imbalance
        )
        setting = _setting_of(recompute, index)
        per_token = activations.kept_bytes(
            layer_bytes, setting, moe=style.moe, width=width, hidden=shape.hidden / layout.sp
        )
        recomputed = layer_bytes.total - per_token
        if setting.granularity == "full":
            recomputed = layer_bytes.total
            # The method "uniform" saves the input of every `layers` layers, and recomputes these layers at once.
            if setting.method == "uniform":
                recomputed *= setting.layers
                if index % setting.layers:
                    per_token = 0.0
        gradients = activations.backward_bytes(
            shape,
            layout,
            width=width,
            imbalance=assumed.expert_imbalance,
            adapters=recipe.policy.lora is not None,
        )
        saved.append(per_token)
        work.append(recomputed + gradients)
    in_flight = layout.layers_in_flight(stage, micro_batches) / max(1, len(layers))
    ends = _ends(family, layout, width, kernels, stage)
    return tokens * (sum(saved) * in_flight + ends), tokens * max(work)


def _setting_of(recompute: Recompute, index: int) -> Recompute:
    """The recompute setting that applies to layer `index` of a model chunk."""
    # The method "block" recomputes only the first layers of a chunk.
    if recompute.granularity == "full" and recompute.method == "block" and index >= recompute.layers:
        return Recompute(granularity="none")
    return recompute


def _ends(family: Family, layout: Layout, width: int, kernels: Kernels, stage: int) -> float:
    """Bytes per token that a stage saves outside of layers, at the embedding and at the final norm and head."""
    hidden = family.transformer["hidden_size"]
    norm = norm_bytes(hidden, width=width, kernels=kernels)
    if kernels.device == "gpu" and layout.sp > 1:
        norm += hidden * width  # the norm's output, which is gathered into the head's input
    ends = 0.0
    if stage == layout.pp - 1:
        ends = norm / layout.sp + hidden * width + 8  # undivided: the head's input is not sequence-parallel
    if stage == 0:
        ends += 8
    return ends


def in_chunk(recipe: Recipe) -> bool:
    """Whether the loss is computed chunk by chunk together with the logits, so that logits are computed only once."""
    return recipe.trainer.loss_in_chunk and algorithm_of(recipe).separable


def logit_bytes(
    recipe: Recipe, family: Family, layout: Layout, tokens: int, *, kernels: Kernels
) -> tuple[float, float]:
    """(bytes of the head's gradients, which are kept until the backward pass; bytes of the logit projection's
    workspace).

    trainer.logit_workspace_mb bounds the workspace. A GPU takes workspace up to the limit; a CPU works in blocks of
    at most 2^25 elements.
    """
    hidden = family.transformer["hidden_size"]
    rows = padded_vocab_size(family.vocab_size, layout.tp) // layout.tp
    narrow = recipe.policy.dtype == "bfloat16"
    stays = 4 * tokens * hidden  # gradients of the head's input
    if in_chunk(recipe) and recipe.policy.lora is None:
        stays += 4 * rows * hidden  # gradients of the head's weights
    selected = WIDTH[recipe.policy.dtype] * tokens * hidden  # copy of the head's input for tokens with loss
    stated = recipe.trainer.logit_workspace_mb
    limit = workspace_mb(stated, large_gpu=kernels.device == "gpu", shared=recipe.engine.colocate) * MIB
    if kernels.device == "gpu":
        return stays, selected + limit
    fits = rows * tokens <= LARGEST_CHUNK and 4 * rows * tokens <= limit
    largest = LARGEST
    if in_chunk(recipe) or fits:  # logits within the limits are kept until the backward pass
        largest = LARGEST_CHUNK
    numbers = min(largest, rows * tokens)
    block = numbers * 4 + 8 * TILE
    if narrow:
        chunk = numbers / rows
        block += 4 * chunk * hidden + 8 * min(rows, _CAST_COLUMNS) * hidden
        if recipe.trainer.logit_gradient == "bf16x2":
            block += 2 * numbers
    return stays, selected + min(limit, block)

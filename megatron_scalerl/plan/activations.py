"""Activation memory: bytes per token that layers save for the backward pass, for each recompute setting.

The saved tensors depend on the layers and on the device (`Kernels`):

* `te` layers are Transformer Engine's. Norms fused into the linear layers save input, output and one number per
  token. SwiGLU saves its input. Attention on packed sequences ("thd") saves queries, keys, values, output and a
  log-sum-exp. The facts come from the code of Transformer Engine 2.11. For two model shapes on one H200, with
  version 2.20.2, planned memory was 1.05 and 1.07 times the measured memory (docs/measurements.md).
* `plain` layers are used without Transformer Engine (`trainer/layers`). SwiGLU is not fused, and saves five tensors
  of the MLP's width instead of three. Rotary angles are saved per token. Attention saves padded copies of queries,
  keys, values and output. On a CPU norms save two fp32 tensors. The CPU's figures were measured with
  `torch.autograd.graph.saved_tensors_hooks`, and tools/bench_plan.py compares plans with the memory of whole runs. On
  a GPU PyTorch's norm is a kernel that saves the input and one number per token. Attention is PyTorch's flash (or
  cuDNN) kernel, which saves the same tensors as the CPU's. The GPU's figures are derived from PyTorch's sources, and
  not measured.
"""

from collections.abc import Collection
from typing import Any, Literal

from megatron_scalerl.models.family import Family, LayerStyle
from megatron_scalerl.plan.hardware import Kernels
from megatron_scalerl.plan.sharding import Layout
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record

MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
"""Megatron's recompute_modules that the planner supports."""


@record
class Recompute:
    """Megatron's recompute settings, from megatron.model."""

    granularity: Literal["none", "selective", "full"]
    modules: Collection[str] = ()
    method: str = "uniform"
    layers: int = 1

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(self.modules)})"
        if self.granularity == "full":
            return f"full ({self.method}, {self.layers})"
        return "none"


def recompute_of(recipe: Recipe) -> Recompute:
    """The recipe's recompute settings. Raises ValueError for settings that the planner does not support."""
    model = recipe.megatron.model
    granularity: Any = model.get("recompute_granularity") or "none"
    modules: tuple[str, ...] = ()
    if granularity == "selective":
        modules = tuple(model.get("recompute_modules") or ("core_attn",))
    for module in modules:
        if module not in MODULES:
            raise ValueError(
                f"megatron.model.recompute_modules: the planner does not know {module!r}; choose from "
                f"{', '.join(MODULES)}"
            )
    if granularity not in ("none", "selective", "full"):
        raise ValueError(f"megatron.model.recompute_granularity: {granularity!r} is neither selective nor full")
    return Recompute(
        granularity=granularity,
        modules=modules,
        method=model.get("recompute_method") or "uniform",
        layers=int(model.get("recompute_num_layers") or 1),
    )


@record
class Shape:
    """Widths of one layer, taken from the Megatron options of the model's family."""

    hidden: int
    query: int
    key: int
    value: int
    out: int
    """Width of the input of attention's output projection."""
    latent: int
    """Width of the outputs of multi-head latent attention's down-projections, which are not sharded; else 0."""
    projections: int
    """Number of elements of the weights of all attention projections."""
    heads: int
    groups: int
    head_dim: int
    ffn: int
    """Width of the dense MLP or of the shared expert; 0 for a layer without either."""
    expert_ffn: int
    experts: int
    top_k: int
    probs_on_input: bool
    qk_norm: bool
    rope: bool


def shape_of(family: Family, style: LayerStyle) -> Shape:
    """The widths of a layer of `family` whose MLP (dense or experts) and attention have the features in `style`."""
    t: dict[str, Any] = dict(family.transformer)
    hidden = t["hidden_size"]
    heads = t["num_attention_heads"]
    query = heads * t["kv_channels"]
    key = t["num_query_groups"] * t["kv_channels"]
    value = key
    out = query
    latent = 0
    projections = 2 * hidden * (query + key)
    if "kv_lora_rank" in t:
        # Multi-head latent attention projects down to narrow widths, and then up to all heads. The rotary part of the
        # keys is not projected up.
        q_rank = t["q_lora_rank"] or 0
        kv_rank = t["kv_lora_rank"]
        rope = t["qk_pos_emb_head_dim"]
        value = out = heads * t["v_head_dim"]
        latent = q_rank + kv_rank + rope
        projections = hidden * (latent + out) + (q_rank or hidden) * query
        projections += kv_rank * (query - heads * rope + value)
    ffn = t["ffn_hidden_size"]
    experts: dict[str, Any] = {}
    if style.moe:
        ffn = t.get("moe_shared_expert_intermediate_size") or 0
        experts = {"moe_router_topk": 1} | t
    return Shape(
        hidden=hidden,
        query=query,
        key=key,
        value=value,
        out=out,
        latent=latent,
        projections=projections,
        heads=heads,
        groups=t["num_query_groups"],
        head_dim=t["kv_channels"],
        ffn=ffn,
        expert_ffn=experts.get("moe_ffn_hidden_size") or 0,
        experts=experts.get("num_moe_experts") or 0,
        top_k=experts.get("moe_router_topk", 0),
        probs_on_input=bool(t.get("moe_apply_probs_on_input")),
        qk_norm=style.qk_norm not in (False, "none"),
        rope=style.rope,
    )


@record
class LayerBytes:
    """Bytes per token that a layer saves on one rank, separated into the parts that recomputation can drop."""

    norms: float
    norm_outputs: float
    unfused_norm_outputs: float
    """Bytes of `norm_outputs` that can be recomputed: the outputs of norms that are not fused into linear layers."""
    attention: float
    """Bytes that attention saves outside of core attention: projection inputs, rotary angles, norms of q and k."""
    core: float
    """Bytes that core attention (scores, softmax, weighted sum) saves without recomputation."""
    core_inputs: float
    """Bytes of queries, keys and values, which core attention saves even if recomputed."""
    mlp: float
    """Bytes that the dense MLP or the shared expert saves."""
    experts: float
    """Bytes that the router, the dispatch of tokens to experts, and the routed experts save."""
    activation: float
    """Part of `experts`: bytes of the outputs of the experts' activation function."""

    @property
    def total(self) -> float:
        """Bytes per token of all parts, without recomputation."""
        return self.norms + self.norm_outputs + self.attention + self.core + self.mlp + self.experts


def layer_bytes(shape: Shape, layout: Layout, *, width: int, kernels: Kernels, imbalance: float) -> LayerBytes:
    """Bytes that a layer saves on one rank, for each token of the rank's share of a micro-batch. width: bytes per
    element. imbalance: `Assumptions.expert_imbalance`."""
    tp = layout.tp
    sp = layout.sp
    q = shape.query / tp
    kv = shape.key / tp
    h = shape.hidden / sp
    out = shape.out / tp
    core_inputs = q + kv + shape.value / tp
    core = core_inputs
    # Transformer Engine does not fuse the norm before a router.
    unfused_norms = min(shape.experts, 1)
    swiglu_widths = 3
    if kernels.layers == "plain":
        # Attention without Transformer Engine also saves a padded copy of the output for the backward pass.
        core += out
        unfused_norms = 2
        swiglu_widths = 5
    angles = 0
    if shape.rope and (kernels.layers == "plain" or shape.qk_norm):
        angles = 4 * shape.head_dim * width
    qk_norm = 0.0
    if shape.qk_norm:
        qk_norm = 4 * (q + kv + shape.heads / tp + shape.groups / tp)
        if width == 4:
            # The saved key is a view of the joint query-key-value output, which therefore stays in memory whole.
            qk_norm += 4 * (q + kv)
    # Latent attention saves the outputs of the down-projections twice, before and after normalization.
    latent = 2 * shape.latent / sp * width
    log_sum_exp = 4 * shape.heads / tp
    return LayerBytes(
        norms=2 * norm_bytes(shape.hidden, width=width, kernels=kernels) / sp,
        norm_outputs=2 * h * width,
        unfused_norm_outputs=unfused_norms * h * width,
        attention=out * width + latent + angles + qk_norm,
        core=core * width + log_sum_exp,
        core_inputs=core_inputs * width,
        mlp=swiglu_widths * shape.ffn / tp * width,
        experts=_experts(shape, layout, width, swiglu_widths, imbalance),
        activation=shape.top_k / sp * imbalance * shape.expert_ffn / layout.etp * width,
    )


def norm_bytes(hidden: float, *, width: int, kernels: Kernels) -> float:
    """Bytes per token that a norm over `hidden` elements saves, without the output. width: bytes per element."""
    if kernels.device == "cpu":
        return 8 * hidden + 4
    return hidden * width + 4


def _routed(shape: Shape, layout: Layout, imbalance: float) -> float:
    """Tokens that the busiest expert-parallel rank's experts receive, per token that the rank holds."""
    routed = shape.top_k / layout.sp
    if layout.ep > 1:
        routed *= imbalance
    return routed


def _experts(shape: Shape, layout: Layout, width: int, swiglu_widths: int, imbalance: float) -> float:
    if not shape.experts:
        return 0.0
    routed = _routed(shape, layout, imbalance) * layout.etp
    widths = swiglu_widths
    weighted_input = 0.0
    if shape.probs_on_input:
        weighted_input = shape.hidden / layout.sp * width
    elif widths == 5:
        # Unfused SwiGLU also saves the output multiplied by the router's weights.
        widths += 1
    router = (9 * shape.experts + 24) / layout.sp
    return router + weighted_input + routed * (shape.hidden + widths * shape.expert_ffn / layout.etp) * width


def kept_bytes(bytes_: LayerBytes, recompute: Recompute, *, moe: bool, width: int, hidden: float) -> float:
    """Bytes per token that a layer saves until the layer's backward pass, under the setting `recompute`. bytes_:
    bytes without recomputation. hidden: elements per token of the layer's input on one rank."""
    if recompute.granularity == "full":
        return hidden * width
    total = bytes_.total
    if "core_attn" in recompute.modules:
        total += bytes_.core_inputs - bytes_.core
    if "layernorm" in recompute.modules:
        total -= bytes_.unfused_norm_outputs
    # `moe` recomputes the whole layer of experts, the shared expert included.
    if "moe" in recompute.modules and moe:
        return total - (bytes_.experts + bytes_.mlp)
    mlp_module = "shared_experts" if moe else "mlp"
    if mlp_module in recompute.modules:
        total -= bytes_.mlp
    if "moe_act" in recompute.modules:
        total -= bytes_.activation
    return total


def backward_bytes(shape: Shape, layout: Layout, *, width: int, imbalance: float, adapters: bool) -> float:
    """Bytes per token of all gradients that are in memory at the same time in a layer's backward pass.

    The gradients are of the MLP, of the residual, and of the layer's input gathered over sequence-parallel ranks.
    """
    widths = 4
    # While an adapter's output is added, three more copies of the outputs of gate and up-projection are in memory.
    if adapters:
        widths = 10
    dense = widths * shape.ffn / layout.tp
    expert = _routed(shape, layout, imbalance) * (widths * shape.expert_ffn + 2 * shape.hidden)
    gathered = 0
    if layout.sequence_parallel:
        # With sequence parallelism the backward pass gathers a layer's input and scatters the input's gradient.
        gathered = 2 * shape.hidden
    return (max(dense, expert) + 2 * shape.hidden / layout.sp + gathered) * width

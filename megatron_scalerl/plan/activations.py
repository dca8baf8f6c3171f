"""Activation memory: bytes per token that layers save for the backward pass, by recompute setting.

What is saved depends on the layers and on the device (`Kernels`):

* `te` layers, Transformer Engine's: norms fused into the linear layers save input, output and one number per token,
  SwiGLU saves its input, attention on packed sequences ("thd") saves queries, keys, values, output and a log-sum-exp.
  Read from the sources of version 2.11 (what each module saves for backward). With version 2.20.2 on one H200 the
  planner's memory was 1.05 and 1.07 times what two shapes took (docs/measurements.md).
* `plain` layers, used without Transformer Engine (`trainer/layers`): unfused SwiGLU saves five widths instead of
  three, rotary angles are saved per token, attention saves padded copies of queries, keys, values and output.
  On a CPU norms save two fp32 copies; measured there with `torch.autograd.graph.saved_tensors_hooks`, and
  tools/bench_plan.py compares whole runs. On a GPU PyTorch's norm is one kernel that saves its input and one number
  per token, and attention is its flash (or cuDNN) kernel, which saves the same as the CPU's. Derived from PyTorch's
  sources, not measured.
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
        return self.granularity if self.granularity == "none" else f"full ({self.method}, {self.layers})"


def recompute_of(recipe: Recipe) -> Recompute:
    """The recipe's recompute settings. Raises ValueError for unsupported ones."""
    model = recipe.megatron.model
    granularity: Any = model.get("recompute_granularity") or "none"
    modules = tuple(model.get("recompute_modules") or ("core_attn",)) if granularity == "selective" else ()
    for module in modules:
        if module not in MODULES:
            known = ", ".join(MODULES)
            raise ValueError(f"megatron.model.recompute_modules: expected some of {known}, found {module!r}")
    if granularity not in ("none", "selective", "full"):
        raise ValueError(f"megatron.model.recompute_granularity: expected selective or full, found {granularity!r}")
    return Recompute(
        granularity=granularity,
        modules=modules,
        method=model.get("recompute_method") or "uniform",
        layers=int(model.get("recompute_num_layers") or 1),
    )


@record
class Shape:
    """Widths of one layer, from the family's Megatron options."""

    hidden: int
    query: int
    key: int
    value: int
    out: int
    """Input of the output projection."""
    latent: int
    """Outputs of the narrow projections of multi-head latent attention, which no rank shards; 0: none."""
    projections: int
    """Weights of all attention projections."""
    heads: int
    groups: int
    head_dim: int
    ffn: int
    """Width of the dense MLP or of the shared expert; 0: none."""
    expert_ffn: int
    experts: int
    top_k: int
    probs_on_input: bool
    qk_norm: bool
    rope: bool


def shape_of(family: Family, style: LayerStyle) -> Shape:
    """The widths of a layer of `style`."""
    t: dict[str, Any] = dict(family.transformer)
    experts = t if style.moe else {}
    hidden, heads, groups, head_dim = (
        t[k] for k in ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    )
    query, key = heads * head_dim, groups * head_dim
    value, out, latent, projections = key, query, 0, 2 * hidden * (query + key)
    if "kv_lora_rank" in t:
        q_rank, kv_rank, rope = t["q_lora_rank"], t["kv_lora_rank"], t["qk_pos_emb_head_dim"]
        value = out = heads * t["v_head_dim"]
        latent = q_rank + kv_rank + rope
        projections = hidden * (latent + out) + q_rank * query + kv_rank * (query - heads * rope + value)
    return Shape(
        hidden=hidden,
        query=query,
        key=key,
        value=value,
        out=out,
        latent=latent,
        projections=projections,
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        ffn=t["ffn_hidden_size"] if not style.moe else t.get("moe_shared_expert_intermediate_size") or 0,
        expert_ffn=experts.get("moe_ffn_hidden_size") or 0,
        experts=experts.get("num_moe_experts") or 0,
        top_k=t.get("moe_router_topk", 1) if style.moe else 0,
        probs_on_input=bool(t.get("moe_apply_probs_on_input")),
        qk_norm=style.qk_norm not in (False, "none"),
        rope=style.rope,
    )


@record
class LayerBytes:
    """Bytes per token that one layer saves on one rank, by the part that recomputation can drop."""

    norms: float
    norm_outputs: float
    norms_apart: float
    """Outputs of norms that are modules of their own: a norm fused into a linear layer is not recomputed."""
    attention: float
    """Inputs of the projections, rotary angles, norms of queries and keys."""
    core: float
    """What core attention saves."""
    core_inputs: float
    """What core attention saves if it is recomputed."""
    mlp: float
    """Inside the dense MLP or the shared expert."""
    experts: float
    """Router, dispatch, inside the experts."""
    activation: float
    """The share of `experts` that is the output of the activation function."""

    @property
    def total(self) -> float:
        """Without recomputation."""
        return self.norms + self.norm_outputs + self.attention + self.core + self.mlp + self.experts


def layer_bytes(shape: Shape, layout: Layout, *, width: int, kernels: Kernels, imbalance: float) -> LayerBytes:
    """What a layer saves per token of the rank's share of a micro-batch; `width` is bytes per element."""
    tp, sp = layout.tp, layout.sp
    q, kv, h = shape.query / tp, shape.key / tp, shape.hidden / sp
    heads, groups = shape.heads / tp, shape.groups / tp
    plain = kernels.layers == "plain"
    angles = 4 * shape.head_dim * width if shape.rope and (plain or shape.qk_norm) else 0
    qk_norm = 4 * (q + kv + heads + groups) if shape.qk_norm else 0
    if shape.qk_norm and width == 4:
        qk_norm += 4 * (q + kv)  # the key is a view of the whole projection, which is saved
    lse = 4 * heads
    v, out = shape.value / tp, shape.out / tp
    copies = (q + out if plain else q) + kv + v
    latent = 2 * shape.latent / sp * width  # before and after their norms
    inner = 5 if plain else 3
    return LayerBytes(
        norms=2 * norm_bytes(shape.hidden, width=width, kernels=kernels) / sp,
        norm_outputs=2 * h * width,
        norms_apart=(2 if plain else bool(shape.experts)) * h * width,
        attention=out * width + latent + angles + qk_norm,
        core=copies * width + lse,
        core_inputs=(q + kv + v) * width,
        mlp=inner * shape.ffn / tp * width,
        experts=_experts(shape, layout, width, inner, imbalance),
        activation=shape.top_k / sp * imbalance * shape.expert_ffn / layout.etp * width,
    )


def norm_bytes(hidden: float, *, width: int, kernels: Kernels) -> float:
    """Bytes per token that one norm of that width saves besides its output."""
    if kernels.device == "cpu":
        return 8 * hidden + 4
    return hidden * width + 4


def _experts(shape: Shape, layout: Layout, width: int, inner: int, imbalance: float) -> float:
    if not shape.experts:
        return 0.0
    # a rank's experts receive as many tokens as it sends, times the load of the busiest rank over the mean
    routed = shape.top_k / layout.sp * (imbalance if layout.ep > 1 else 1.0) * layout.etp
    inside = inner if shape.probs_on_input or inner == 3 else inner + 1
    weighted = shape.hidden / layout.sp * width if shape.probs_on_input else 0.0
    router = (9 * shape.experts + 24) / layout.sp
    return router + weighted + routed * (shape.hidden + inside * shape.expert_ffn / layout.etp) * width


def kept(bytes_: LayerBytes, recompute: Recompute, *, moe: bool, width: int, hidden: float) -> float:
    """Bytes per token that one layer saves until its backward pass under the recompute setting."""
    if recompute.granularity == "full":
        return hidden * width
    total = bytes_.total
    if "core_attn" in recompute.modules:
        total += bytes_.core_inputs - bytes_.core
    if "layernorm" in recompute.modules:
        total -= bytes_.norms_apart
    if "moe" in recompute.modules and moe:
        total -= bytes_.experts + bytes_.mlp
    else:
        total -= bytes_.mlp if ("shared_experts" if moe else "mlp") in recompute.modules else 0.0
        total -= bytes_.activation if "moe_act" in recompute.modules else 0.0
    return total


def backward_bytes(shape: Shape, layout: Layout, *, width: int, imbalance: float) -> float:
    """Bytes per token of gradients alive at once in a layer's backward pass: MLP, residual, gathered input."""
    dense = 4 * shape.ffn / layout.tp
    routed = shape.top_k / layout.sp * (imbalance if layout.ep > 1 else 1.0)
    expert = routed * (4 * shape.expert_ffn + 2 * shape.hidden)
    gathered = 2 * shape.hidden if layout.sequence_parallel else 0
    return (max(dense, expert) + 2 * shape.hidden / layout.sp + gathered) * width

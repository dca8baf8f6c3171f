"""Llama 4, the text model: Scout, Maverick, and the mixture of experts of `megatron_scalerl.tiny`.

The features of Llama 4 models:

* a sigmoid top-1 router whose probability multiplies the expert's input, and a shared expert;
* a weightless RMS norm of queries and keys. Hugging Face applies the norm after RoPE. Here the norm comes before
  RoPE, with the same result, since a rotation keeps the norm;
* layers without RoPE and without a norm of queries and keys;
* interleaved rotary pairs, and chunked attention;
* experts fused into transposed tensors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.blocks import attention_rules, build_family, outer_rules
from megatron_scalerl.models.experts import fused_expert_rules, mlp_rules
from megatron_scalerl.models.family import Family, LayerStyle, QkNorm, Rule, require
from megatron_scalerl.models.rules import Location

if TYPE_CHECKING:
    import torch

VISION = ("vision_model.", "multi_modal_projector.")
"""Prefixes of the multimodal model's tensors outside the policy, never trained and never sent to engines."""


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a Llama4TextConfig, or of the text part of a
    Llama4Config.

    Raises ValueError for biases, activations other than SiLU, more than one expert per token, and YaRN.
    """
    text = getattr(config, "text_config", None) or config
    prefix = ""
    passthrough: tuple[str, ...] = ()
    if text is not config:
        prefix = "language_model."
        passthrough = VISION
    require(text, "attention_bias", False)
    require(text, "hidden_act", "silu")
    # Megatron-Core's moe_apply_probs_on_input works only with moe_router_topk 1.
    require(text, "num_experts_per_tok", 1)
    moe_layers = set(text.moe_layers)
    styles = tuple(_style(text, layer, moe=layer in moe_layers) for layer in range(text.num_hidden_layers))
    query_scale = None
    if text.attn_temperature_tuning:
        query_scale = partial(
            attention_temperature, floor_scale=float(text.floor_scale), attn_scale=float(text.attn_scale)
        )
    return build_family(
        text,
        name="llama4",
        layers=styles,
        rules=_rules(text, styles, prefix),
        transformer=_transformer(text, styles),
        passthrough=passthrough,
        attention_chunk_size=text.attention_chunk_size,
        query_scale=query_scale,
        # Without attn_temperature_tuning vLLM decides by max_model_len (vllm/model_executor/models/llama4.py).
        generation_config={"attn_temperature_tuning": bool(text.attn_temperature_tuning)},
    )


def _style(text: Any, layer: int, *, moe: bool) -> LayerStyle:
    # Despite the name, Hugging Face's no_rope_layers has 1 for a layer with RoPE.
    rope = bool(text.no_rope_layers[layer])
    qk_norm: QkNorm = "none"
    if rope and text.use_qk_norm:
        qk_norm = "weightless"
    chunked = text.layer_types[layer] == "chunked_attention"
    return LayerStyle(moe=moe, rope=rope, qk_norm=qk_norm, chunked=chunked)


def _transformer(text: Any, styles: tuple[LayerStyle, ...]) -> dict[str, Any]:
    options = dict(
        # intermediate_size_mlp is the width of dense layers, intermediate_size the width of experts.
        ffn_hidden_size=text.intermediate_size_mlp,
        rotary_interleaved=True,
        # Megatron's no_rope_freq has 1 for a layer without RoPE.
        no_rope_freq=[int(not style.rope) for style in styles],
        qk_l2_norm=any(style.qk_norm == "weightless" for style in styles),
    )
    # Megatron-Core refuses moe_ffn_hidden_size without num_moe_experts.
    if not any(style.moe for style in styles):
        return options
    return dict(
        **options,
        num_moe_experts=text.num_local_experts,
        moe_layer_freq=[int(style.moe) for style in styles],
        moe_ffn_hidden_size=text.intermediate_size,
        moe_shared_expert_intermediate_size=text.intermediate_size,
        moe_router_topk=text.num_experts_per_tok,
        moe_router_score_function="sigmoid",
        moe_apply_probs_on_input=True,
    )


def attention_temperature(positions: torch.Tensor, *, floor_scale: float, attn_scale: float) -> torch.Tensor:
    """The factors [N] by which queries at positions [N] are multiplied in layers without RoPE (attention
    temperature).

    The factor is 1 below `floor_scale` tokens. Source: arXiv 2501.19399.
    """
    import torch

    return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0


def _rules(text: Any, styles: tuple[LayerStyle, ...], prefix: str) -> tuple[Rule, ...]:
    first, last = outer_rules(text, f"{prefix}model.", f"{prefix}lm_head.weight")
    weight_map = list(first)
    for layer, style in enumerate(styles):
        weight_map += attention_rules(text, layer, style, prefix=f"{prefix}model.")
        hf = f"{prefix}model.layers.{layer}.feed_forward."
        megatron = f"decoder.layers.{layer}.mlp."
        if style.moe:
            weight_map += _moe_rules(text, layer, hf, megatron)
            continue
        weight_map += mlp_rules(
            hf,
            megatron,
            ffn=text.intermediate_size_mlp,
            hidden=text.hidden_size,
            at=Location(layer=layer),
            what="config.json: intermediate_size_mlp",
        )
    return (*weight_map, *last)


def _moe_rules(text: Any, layer: int, hf: str, megatron: str) -> list[Rule]:
    at = Location(layer=layer)
    experts = text.num_local_experts
    hidden = text.hidden_size
    ffn = text.intermediate_size
    shared = mlp_rules(f"{hf}shared_expert.", f"{megatron}shared_experts.", ffn=ffn, hidden=hidden, at=at)
    fused = fused_expert_rules(
        f"{hf}experts.",
        megatron,
        layer=layer,
        what="config.json: intermediate_size",
        transposed=True,
        experts=experts,
        ffn=ffn,
        hidden=hidden,
    )
    router = rules.replicated(f"{megatron}router.weight", f"{hf}router.weight", (experts, hidden), at)
    return [router, *shared, *fused]

"""Qwen3 mixtures of experts: a softmax top-k router, no shared expert, optional dense layers in between.

Checkpoints store every expert separately. In the in-memory layout of transformers 5 a layer has a tensor
[experts, 2 ffn, hidden] and a tensor [experts, hidden, ffn].
"""

from functools import partial
from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.blocks import (
    attention_rules,
    build_family,
    expert_rules,
    fused_expert_rules,
    mlp_rules,
    outer_rules,
    require_full_attention,
)
from megatron_scalerl.models.family import Family, LayerStyle, Rule
from megatron_scalerl.models.rules import Location


def family(config: Any, *, fused: bool = False) -> Family:
    """The Family of a Qwen3MoeConfig; `fused`: the checkpoint has a layer's experts in one tensor.

    Raises ValueError for sliding windows, activations other than SiLU, and a router whose probabilities are all 1.
    """
    require_full_attention(config)
    # A single probability that is normalized is 1: the router would get no gradient.
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        raise ValueError("config.json: num_experts_per_tok: 1 is too few with norm_topk_prob; take at least 2")
    sparse = tuple(_sparse(config, layer) for layer in range(config.num_hidden_layers))
    transformer: dict[str, Any] = dict(qk_layernorm=True)
    if any(sparse):
        transformer |= dict(
            num_moe_experts=config.num_experts,
            moe_layer_freq=[int(moe) for moe in sparse],
            moe_ffn_hidden_size=config.moe_intermediate_size,
            moe_router_topk=config.num_experts_per_tok,
            moe_router_score_function="softmax",
            # the softmax over the chosen experts is the normalized probability
            moe_router_pre_softmax=not config.norm_topk_prob,
        )
    return build_family(
        config,
        name="qwen3_moe",
        layers=tuple(LayerStyle(moe=moe, qk_norm="weighted") for moe in sparse),
        rules=_rules(config, sparse, fused=fused),
        transformer=transformer,
    )


def _sparse(config: Any, layer: int) -> bool:
    """True for a layer with experts."""
    # the rule is that of transformers' Qwen3MoeDecoderLayer
    if layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    return config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


def _rules(config: Any, sparse: tuple[bool, ...], *, fused: bool) -> tuple[Rule, ...]:
    first, last = outer_rules(config, "model.", "lm_head.weight")
    weight_map = list(first)
    make_expert_rules = expert_rules
    if fused:
        make_expert_rules = partial(fused_expert_rules, transposed=False)
    experts = config.num_experts
    hidden = config.hidden_size
    for layer, moe in enumerate(sparse):
        weight_map += attention_rules(config, layer, "model.", qk_norm="weighted")
        hf = f"model.layers.{layer}.mlp."
        megatron = f"decoder.layers.{layer}.mlp."
        at = Location(layer=layer)
        if not moe:
            weight_map += mlp_rules(hf, megatron, ffn=config.intermediate_size, hidden=hidden, at=at)
            continue
        weight_map.append(rules.replicated(f"{megatron}router.weight", f"{hf}gate.weight", (experts, hidden), at))
        weight_map += make_expert_rules(
            f"{hf}experts.",
            megatron,
            layer=layer,
            experts=experts,
            ffn=config.moe_intermediate_size,
            hidden=hidden,
            what="config.json: moe_intermediate_size",
        )
    return (*weight_map, *last)

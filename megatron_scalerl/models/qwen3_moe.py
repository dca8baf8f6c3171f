"""Qwen3 mixtures of experts: a softmax top-k router, no shared expert, optional dense layers in between.

Checkpoints store every expert separately; those of transformers 5 in its in-memory layout have one tensor
[experts, 2 ffn, hidden] and one [experts, hidden, ffn] per layer.
"""

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
from megatron_scalerl.models.rules import At


def family(config: Any, *, fused: bool = False) -> Family:
    """The Family of a Qwen3MoeConfig; `fused`: the checkpoint has a layer's experts in one tensor.

    Raises ValueError for sliding windows, activations other than SiLU, and a router whose probabilities are all 1.
    """
    require_full_attention(config)
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        raise ValueError("config.json: num_experts_per_tok: 1 is too few with norm_topk_prob; take at least 2")
    sparse = tuple(_sparse(config, layer) for layer in range(config.num_hidden_layers))
    routed = dict(
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
        transformer=dict(qk_layernorm=True, **(routed if any(sparse) else {})),
    )


def _sparse(config: Any, layer: int) -> bool:
    """Whether the layer has experts."""
    if layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    return config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


def _rules(config: Any, sparse: tuple[bool, ...], *, fused: bool) -> tuple[Rule, ...]:
    first, last = outer_rules(config, "model.", "lm_head.weight")
    found = list(first)
    for layer, moe in enumerate(sparse):
        found += attention_rules(config, layer, "model.", qk_norm="weighted")
        hf, megatron, at = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp.", At(layer=layer)
        if not moe:
            found += mlp_rules(hf, megatron, ffn=config.intermediate_size, hidden=config.hidden_size, at=at)
            continue
        shape = (config.num_experts, config.hidden_size)
        found.append(rules.replicated(f"{megatron}router.weight", f"{hf}gate.weight", shape, at))
        sizes = dict(experts=config.num_experts, ffn=config.moe_intermediate_size, hidden=config.hidden_size)
        what, experts = "config.json: moe_intermediate_size", f"{hf}experts."
        if fused:
            found += fused_expert_rules(experts, megatron, layer=layer, what=what, transposed=False, **sizes)
        else:
            found += expert_rules(experts, megatron, layer=layer, what=what, **sizes)
    return (*found, *last)

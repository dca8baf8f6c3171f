"""DeepSeek-V3 and Kimi-K2 for the planner alone: the exact shapes of every weight; nothing trains them.

Multi-head latent attention: queries and keys with values pass through narrow projections (`q_lora_rank`,
`kv_lora_rank`), which every tensor-parallel rank holds whole, as in Megatron's MLASelfAttention. The router's
correction bias is no parameter: 256 or 384 numbers a layer, which no optimizer steps.
"""

from math import prod
from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.blocks import expert_rules, mlp_rules, outer_rules
from megatron_scalerl.models.family import Family, LayerStyle, Rule, require
from megatron_scalerl.models.rope import rotary
from megatron_scalerl.models.rules import At


def family(config: Any) -> Family:
    """The Family of a DeepseekV3Config. Raises ValueError for attention biases, and queries without a projection."""
    require(config, "attention_bias", False)
    if not config.q_lora_rank:
        raise ValueError(f"config.json: q_lora_rank is {config.q_lora_rank!r}; queries need a narrow projection")
    layers = config.num_hidden_layers
    first, last = outer_rules(config, "model.", "lm_head.weight")
    of_layers = [rule for layer in range(layers) for rule in _layer_rules(config, layer)]
    return Family(
        name=config.model_type,
        transformer=dict(
            num_layers=layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_attention_heads,
            kv_channels=config.qk_nope_head_dim + config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_pos_emb_head_dim=config.qk_rope_head_dim,
            ffn_hidden_size=config.intermediate_size,
            num_moe_experts=config.n_routed_experts,
            moe_ffn_hidden_size=config.moe_intermediate_size,
            moe_shared_expert_intermediate_size=_shared(config),
            moe_router_topk=config.num_experts_per_tok,
        ),
        gpt=dict(max_sequence_length=config.max_position_embeddings),
        vocab_size=config.vocab_size,
        inv_freq=rotary(config, config.qk_rope_head_dim).inv_freq,
        layers=tuple(LayerStyle(moe=layer >= config.first_k_dense_replace) for layer in range(layers)),
        rules=(*first, *of_layers, *last),
        untrained=_mtp_parameters(config),
    )


def _shared(config: Any) -> int:
    return config.n_shared_experts * config.moe_intermediate_size


def _mtp_parameters(config: Any) -> int:
    """In layers of multi-token prediction: an expert layer, three norms, a projection, another embedding and head."""
    layers, hidden = getattr(config, "num_nextn_predict_layers", 0) or 0, config.hidden_size
    of_layer = sum(prod(s) for r in _layer_rules(config, config.num_hidden_layers) for s in r.hf_shapes.values())
    return layers * (of_layer + 3 * hidden + 2 * hidden * hidden + 2 * config.vocab_size * hidden)


def _layer_rules(config: Any, layer: int) -> list[Rule]:
    hf, megatron, at = f"model.layers.{layer}.", f"decoder.layers.{layer}.", At(layer=layer)
    theirs, ours, hidden, heads = (
        f"{hf}self_attn.",
        f"{megatron}self_attention.",
        config.hidden_size,
        "num_attention_heads",
    )
    query = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    key_value = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    value = config.num_attention_heads * config.v_head_dim
    narrow, what = config.kv_lora_rank + config.qk_rope_head_dim, f"config.json: {heads}"
    found = [
        rules.replicated(f"{megatron}input_layernorm.weight", f"{hf}input_layernorm.weight", (hidden,), at),
        rules.replicated(
            f"{megatron}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", (hidden,), at
        ),
        rules.row(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", hidden, value, at, what=what),
    ]
    for kind, down, rows, rank, width in (
        ("q", "q_a_proj", config.q_lora_rank, config.q_lora_rank, query),
        ("kv", "kv_a_proj_with_mqa", narrow, config.kv_lora_rank, key_value),
    ):
        up, norm = f"{theirs}{kind}_b_proj.weight", f"{theirs}{kind}_a_layernorm.weight"
        found += [
            rules.replicated(f"{ours}linear_{kind}_down_proj.weight", f"{theirs}{down}.weight", (rows, hidden), at),
            rules.replicated(f"{ours}{kind}_layernorm.weight", norm, (rank,), at),
            rules.column(f"{ours}linear_{kind}_up_proj.weight", up, width, rank, at, what=what),
        ]
    hf, megatron = f"{hf}mlp.", f"{megatron}mlp."
    if layer < config.first_k_dense_replace:
        return [*found, *mlp_rules(hf, megatron, ffn=config.intermediate_size, hidden=hidden, at=at)]
    sizes = dict(ffn=config.moe_intermediate_size, hidden=hidden, what="config.json: moe_intermediate_size")
    return [
        *found,
        rules.replicated(f"{megatron}router.weight", f"{hf}gate.weight", (config.n_routed_experts, hidden), at),
        *mlp_rules(f"{hf}shared_experts.", f"{megatron}shared_experts.", **{**sizes, "ffn": _shared(config)}, at=at),
        *expert_rules(f"{hf}experts.", megatron, experts=config.n_routed_experts, layer=layer, **sizes),
    ]

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
from megatron_scalerl.models.rules import Location


def family(config: Any) -> Family:
    """The Family of a DeepseekV3Config. Raises ValueError for attention biases, and queries without a projection."""
    require(config, "attention_bias", False)
    if not config.q_lora_rank:
        raise ValueError(f"config.json: q_lora_rank is {config.q_lora_rank!r}; queries without it are not supported")
    layers = config.num_hidden_layers
    first, last = outer_rules(config, "model.", "lm_head.weight")
    weight_map = list(first)
    for layer in range(layers):
        weight_map += _layer_rules(config, layer)
    return Family(
        name=config.model_type,
        transformer=dict(
            num_layers=layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            # after the wide projection each head has its own keys and values
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
        rules=(*weight_map, *last),
        untrained=_mtp_parameters(config),
    )


def _shared(config: Any) -> int:
    return config.n_shared_experts * config.moe_intermediate_size


def _mtp_parameters(config: Any) -> int:
    """Number of parameters in layers of multi-token prediction, which the checkpoint has after the others.

    Each is an expert layer, three norms, a projection of two hidden states to one, another embedding and head.
    """
    layers = getattr(config, "num_nextn_predict_layers", 0) or 0
    hidden = config.hidden_size
    total = 3 * hidden + 2 * hidden * hidden + 2 * config.vocab_size * hidden
    # checkpoints number these layers after the others, where all layers have experts
    for rule in _layer_rules(config, config.num_hidden_layers):
        total += sum(map(prod, rule.hf_shapes.values()))
    return layers * total


def _layer_rules(config: Any, layer: int) -> list[Rule]:
    hf = f"model.layers.{layer}."
    megatron = f"decoder.layers.{layer}."
    at = Location(layer=layer)
    hidden = config.hidden_size
    weight_map = [
        rules.replicated(f"{megatron}input_layernorm.weight", f"{hf}input_layernorm.weight", (hidden,), at),
        rules.replicated(
            f"{megatron}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", (hidden,), at
        ),
        *_attention_rules(config, f"{hf}self_attn.", f"{megatron}self_attention.", at),
    ]
    hf += "mlp."
    megatron += "mlp."
    if layer < config.first_k_dense_replace:
        return weight_map + mlp_rules(hf, megatron, ffn=config.intermediate_size, hidden=hidden, at=at)
    what = "config.json: moe_intermediate_size"
    experts = config.n_routed_experts
    weight_map.append(rules.replicated(f"{megatron}router.weight", f"{hf}gate.weight", (experts, hidden), at))
    shared = dict(ffn=_shared(config), hidden=hidden, at=at, what=what)
    weight_map += mlp_rules(f"{hf}shared_experts.", f"{megatron}shared_experts.", **shared)
    sizes = dict(experts=experts, ffn=config.moe_intermediate_size, hidden=hidden)
    return weight_map + expert_rules(f"{hf}experts.", megatron, layer=layer, what=what, **sizes)


def _attention_rules(config: Any, hf: str, megatron: str, at: Location) -> list[Rule]:
    """Rules of multi-head latent attention: for queries, and for keys with values, down, norm and up."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    what = "config.json: num_attention_heads"
    value = heads * config.v_head_dim
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    key_value = heads * config.qk_nope_head_dim + value
    # The part of the keys that RoPE rotates is one head for all, and comes from the narrow projection as it is.
    narrow = config.kv_lora_rank + config.qk_rope_head_dim
    weight_map = [rules.row(f"{megatron}linear_proj.weight", f"{hf}o_proj.weight", hidden, value, at, what=what)]
    # the norm covers `rank` of the `rows`: it leaves out the part of the keys that RoPE rotates
    for kind, down, rows, rank, width in (
        ("q", "q_a_proj", config.q_lora_rank, config.q_lora_rank, query),
        ("kv", "kv_a_proj_with_mqa", narrow, config.kv_lora_rank, key_value),
    ):
        norm = f"{hf}{kind}_a_layernorm.weight"
        up = f"{hf}{kind}_b_proj.weight"
        weight_map += [
            rules.replicated(f"{megatron}linear_{kind}_down_proj.weight", f"{hf}{down}.weight", (rows, hidden), at),
            rules.replicated(f"{megatron}{kind}_layernorm.weight", norm, (rank,), at),
            rules.column(f"{megatron}linear_{kind}_up_proj.weight", up, width, rank, at, what=what),
        ]
    return weight_map

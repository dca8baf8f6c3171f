"""DeepSeek-V3, Kimi-K2 and Moonlight: multi-head latent attention, and a sigmoid router with a frozen bias.

Queries and keys with values pass through narrow projections (`q_lora_rank`, `kv_lora_rank`), which every
tensor-parallel rank holds whole. The router's bias chooses experts and does not weigh them. Layers of multi-token
prediction are outside the policy: an export copies them.
"""

from math import prod
from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.blocks import build_family, expert_rules, mlp_rules, outer_rules
from megatron_scalerl.models.family import Family, LayerStyle, Rule, require
from megatron_scalerl.models.rules import Location


def family(config: Any) -> Family:
    """The Family of a DeepseekV3Config.

    Raises ValueError for biases, activations other than SiLU, routers other than a normalized sigmoid's with a bias,
    groups of experts that are not scored by their best two, and scalings of positions on which engines differ.
    """
    require(config, "attention_bias", False)
    require(config, "hidden_act", "silu")
    require(config, "rope_interleave", True)
    require(config, "moe_layer_freq", 1)
    require(config, "norm_topk_prob", True)
    require(config, "head_dim", config.qk_rope_head_dim)  # the part of a head that RoPE rotates
    require(config, "tie_word_embeddings", False)  # vLLM's class has a head of its own
    require(config, "index_topk", None)  # makes it DeepSeek-V3.2 in vLLM
    for key in ("num_experts_per_tok", "n_group", "topk_group", "n_shared_experts"):
        if not getattr(config, key):
            raise ValueError(f"config.json: {key}: it has to be at least 1")
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if getattr(config, key, None) != value:  # vLLM takes a config without the key for another router
            raise ValueError(f"config.json: {key}: it has to be {value!r}")
    layers = config.num_hidden_layers
    first, last = outer_rules(config, "model.", "lm_head.weight")
    weight_map = list(first)
    for layer in range(layers):
        weight_map += _layer_rules(config, layer)
    moe = [layer >= config.first_k_dense_replace for layer in range(layers)]
    mtp_layers = getattr(config, "num_nextn_predict_layers", 0) or 0
    return build_family(
        config,
        name=config.model_type,
        layers=tuple(LayerStyle(moe=experts) for experts in moe),
        rules=(*weight_map, *last),
        transformer=dict(
            # after the wide projection each head has its own keys and values
            num_query_groups=config.num_attention_heads,
            kv_channels=config.qk_nope_head_dim + config.qk_rope_head_dim,
            softmax_scale=None,
            apply_rope_fusion=False,  # Megatron's kernels count a row's tokens from 0
            moe_layer_freq=[int(experts) for experts in moe],
            **_latent_attention(config),
            **_router(config),
        ),
        passthrough=(
            *(f"model.layers.{layer}." for layer in range(layers, layers + mtp_layers)),
            *(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(layers)),
        ),
        untrained=mtp_layers * _mtp_parameters(config),
    )


def _latent_attention(config: Any) -> dict[str, Any]:
    """Fields of MLATransformerConfig. Raises ValueError for scalings that vLLM computes in another way."""
    rope = getattr(config, "rope_parameters", None) or {}
    top = rope.get("mscale")
    bottom = rope.get("mscale_all_dim")
    kind = rope.get("rope_type", "default")
    factor = 1.0
    if kind == "yarn":
        factor = rope.get("factor") or 0.0
    if kind not in ("default", "yarn") or not factor:  # vLLM takes every other type for YaRN
        raise ValueError(f"config.json: rope_scaling: {kind!r} has to be 'default', or 'yarn' with a factor")
    if bool(top) != bool(bottom) or 0 in (top, bottom) or rope.get("attention_factor") is not None:
        raise ValueError(
            "config.json: rope_scaling: mscale and mscale_all_dim have to be both there and not 0, or both missing, "
            "and attention_factor missing; engines would scale attention in another way"
        )
    if not rope.get("truncate", True):
        raise ValueError("config.json: rope_scaling: truncate has to be true, as in engines")
    return dict(
        multi_latent_attention=True,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rotary_scaling_factor=float(factor),
        mscale=top or 1.0,
        mscale_all_dim=bottom or 0.0,
    )


def _router(config: Any) -> dict[str, Any]:
    """Fields of TransformerConfig for experts. Raises ValueError for groups that Megatron-Core scores otherwise."""
    topk = config.num_experts_per_tok
    groups = {}
    if config.n_group > config.topk_group:
        if topk // config.topk_group != 2:
            raise ValueError(
                f"config.json: num_experts_per_tok: {topk} experts from {config.topk_group} groups (topk_group) are "
                "not supported, only two a group; Megatron-Core would score groups in another way"
            )
        groups = dict(moe_router_num_groups=config.n_group, moe_router_group_topk=config.topk_group)
    if topk < 2:
        raise ValueError(f"config.json: num_experts_per_tok: {topk} is too few with norm_topk_prob; take at least 2")
    return dict(
        num_moe_experts=config.n_routed_experts,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_shared_expert_intermediate_size=_shared(config),
        moe_router_topk=topk,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
        **groups,
    )


def _shared(config: Any) -> int:
    return config.n_shared_experts * config.moe_intermediate_size


def _mtp_parameters(config: Any) -> int:
    """Number of parameters of a layer of multi-token prediction, which the checkpoint has after the others.

    It is an expert layer, three norms, a projection of two hidden states to one, another embedding and head.
    """
    hidden = config.hidden_size
    total = 3 * hidden + 2 * hidden * hidden + 2 * config.vocab_size * hidden
    # checkpoints number these layers after the others, where all layers have experts
    for rule in _layer_rules(config, config.num_hidden_layers):
        if not rule.frozen:
            total += sum(map(prod, rule.hf_shapes.values()))
    return total


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
    bias = f"{hf}gate.e_score_correction_bias"
    weight_map += [
        rules.replicated(f"{megatron}router.weight", f"{hf}gate.weight", (experts, hidden), at),
        rules.replicated(f"{megatron}router.expert_bias", bias, (experts,), at, frozen=True),
    ]
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
    latents = [("kv", "kv_a_proj_with_mqa", narrow, config.kv_lora_rank, key_value)]
    if config.q_lora_rank:
        latents.append(("q", "q_a_proj", config.q_lora_rank, config.q_lora_rank, query))
    else:
        name = f"{megatron}linear_q_proj.weight"
        weight_map.append(rules.column(name, f"{hf}q_proj.weight", query, hidden, at, what=what))
    for kind, down, rows, rank, width in latents:
        norm = f"{hf}{kind}_a_layernorm.weight"
        up = f"{hf}{kind}_b_proj.weight"
        weight_map += [
            rules.replicated(f"{megatron}linear_{kind}_down_proj.weight", f"{hf}{down}.weight", (rows, hidden), at),
            rules.replicated(f"{megatron}{kind}_layernorm.weight", norm, (rank,), at),
            rules.column(f"{megatron}linear_{kind}_up_proj.weight", up, width, rank, at, what=what),
        ]
    return weight_map

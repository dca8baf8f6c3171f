"""DeepSeek-V3, Kimi-K2 and Moonlight: multi-head latent attention, and a sigmoid router with a frozen bias.

Queries pass through a narrow projection (`q_lora_rank`), keys and values through a second (`kv_lora_rank`). Every
tensor-parallel rank holds the narrow projections whole. The router's bias affects which experts are chosen, but not
the weights of the chosen experts. Layers of multi-token prediction are outside the policy; an export copies them.
"""

from functools import partial
from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.blocks import decoder_family, norm_rules
from megatron_scalerl.models.experts import dense_first, sigmoid_experts
from megatron_scalerl.models.family import Family, LayerStyle, Rule, require, require_present
from megatron_scalerl.models.rules import Location


def family(config: Any) -> Family:
    """Build the Family (Megatron options and weight map) of a DeepseekV3Config.

    Raises ValueError as `latent_family` does, and for a router that is not DeepSeek-V3's.
    """
    # If scoring_func or topk_method is missing, vLLM uses a different router.
    require_present(config, "scoring_func", "sigmoid")
    require_present(config, "topk_method", "noaux_tc")
    return latent_family(config)


def latent_family(config: Any) -> Family:
    """The Family of a config with DeepSeek-V3's keys of latent attention and experts.

    Raises ValueError as `decoder_family` and `sigmoid_experts` do, and for options that trainer and engines would
    compute differently.
    """
    require(config, "moe_layer_freq", 1)
    require(config, "rope_interleave", True)
    # In DeepSeek-V3's config `head_dim` is the size of the part of a head that RoPE rotates.
    require(config, "head_dim", config.qk_rope_head_dim)
    # vLLM's class for DeepSeek-V3 never ties the head to the embedding.
    require(config, "tie_word_embeddings", False)
    # If `index_topk` is set, vLLM computes DeepSeek-V3.2, with sparse attention.
    require(config, "index_topk", None)
    layers = range(config.num_hidden_layers)
    return decoder_family(
        config,
        layers=dense_first(config),
        experts=sigmoid_experts(config),
        attention=partial(_attention_rules, config),
        transformer=dict(
            # The up-projection gives each head separate keys and values.
            num_query_groups=config.num_attention_heads,
            kv_channels=config.qk_nope_head_dim + config.qk_rope_head_dim,
            softmax_scale=None,
            # Megatron's fused RoPE kernels would count positions from a packed row's start, not from a sequence's.
            apply_rope_fusion=False,
            **_latent_attention(config),
        ),
        prediction_layers=getattr(config, "num_nextn_predict_layers", 0) or 0,
        passthrough=tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in layers),
    )


def _latent_attention(config: Any) -> dict[str, Any]:
    """Fields of MLATransformerConfig. Raises ValueError for a scaling of rotary positions that vLLM computes
    differently."""
    rope = getattr(config, "rope_parameters", None) or {}
    top = rope.get("mscale")
    bottom = rope.get("mscale_all_dim")
    kind = rope.get("rope_type", "default")
    factor = 1.0
    if kind == "yarn":
        factor = rope.get("factor") or 0.0
    # vLLM takes every type other than `default` for YaRN.
    if kind not in ("default", "yarn") or not factor:
        raise ValueError(
            f"config.json: rope_scaling: {kind!r} is not supported, only 'default', or 'yarn' with a factor"
        )
    if bool(top) != bool(bottom) or 0 in (top, bottom) or rope.get("attention_factor") is not None:
        raise ValueError(
            "config.json: rope_scaling: set both mscale and mscale_all_dim (not 0) or neither, without "
            "attention_factor; otherwise engines would scale attention in another way than the trainer"
        )
    if not rope.get("truncate", True):
        raise ValueError("config.json: rope_scaling: truncate has to be true, because engines always truncate")
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


def _attention_rules(config: Any, layer: int, style: LayerStyle) -> list[Rule]:
    """Rules of a layer's norms and of multi-head latent attention.

    Queries pass a down-projection, a norm and an up-projection. Keys and values together pass a second
    down-projection, norm and up-projection. Without `q_lora_rank` queries have a single projection.
    """
    at = Location(layer=layer)
    hidden = config.hidden_size
    heads = config.num_attention_heads
    what = "config.json: num_attention_heads"
    value = heads * config.v_head_dim
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    key_value = heads * config.qk_nope_head_dim + value
    # All heads share one rotated part of the keys, which the down-projection computes.
    narrow = config.kv_lora_rank + config.qk_rope_head_dim
    weight_map = norm_rules(config, layer, "model.", style)
    hf = f"model.layers.{layer}.self_attn."
    megatron = f"decoder.layers.{layer}.self_attention."
    weight_map.append(rules.row(f"{megatron}linear_proj.weight", f"{hf}o_proj.weight", hidden, value, at, what=what))
    # `rows` outputs of the down-projection, but the norm covers only `rank`, without the rotated part of the keys.
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

"""Rules and options that families share: embedding and head, attention, gated MLP, experts, dense models."""

from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.family import Family, LayerStyle, QkNorm, Rule, require
from megatron_scalerl.models.rope import rotary
from megatron_scalerl.models.rules import Location

READ_BY_ENGINES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, 0),
    "dual_chunk_attention_config": (None,),
    "llama_4_scaling": (None,),
    "is_causal": (True,),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "qk_norm": (False,),
    "bias": (False,),
    "shared_expert_intermediate_size": (0, None),
}
"""Keys that vLLM 0.32 reads in families that do not have them, where transformers ignores them -> values that change
nothing (vllm/model_executor/models/{llama,mistral,qwen2,qwen3_moe}.py, vllm/config/model.py)."""


def head_size(config: Any) -> int:
    """Dimension of one attention head, which may differ from hidden size / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def key_value_heads(config: Any) -> int:
    """Number of key and value heads; by default that of query heads."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def build_family(
    config: Any,
    *,
    name: str,
    layers: tuple[LayerStyle, ...],
    rules: tuple[Rule, ...],
    transformer: dict[str, Any] | None = None,
    **more: Any,
) -> Family:
    """The Family of a config with Llama's and Qwen's keys.

    transformer: fields of TransformerConfig that are added or replaced. more: further fields of Family. Raises
    ValueError for quantized weights, and for a key with which an engine computes another model.
    """
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", "unknown method")
        raise ValueError(
            f"config.json: the weights are quantized ({method}); take the policy's bf16 release, or convert it "
            "(docs/families.md)"
        )
    for key, allowed in READ_BY_ENGINES.items():
        require(config, key, *allowed)
    head_dim = head_size(config)
    # One key for queries, keys, values and output, in Llama and Qwen3.
    bias = bool(getattr(config, "attention_bias", False))
    rope = rotary(config, head_dim)
    return Family(
        name=name,
        transformer=dict(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=key_value_heads(config),
            kv_channels=head_dim,
            ffn_hidden_size=config.intermediate_size,
            layernorm_epsilon=config.rms_norm_eps,
            init_method_std=config.initializer_range,
            softmax_scale=rope.softmax_scale(head_dim),
            add_qkv_bias=bias,
        )
        | (transformer or {}),
        gpt=dict(
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
        ),
        vocab_size=config.vocab_size,
        inv_freq=rope.inv_freq,
        layers=layers,
        rules=rules,
        output_bias=bias,
        **more,
    )


def dense_rules(config: Any, **attention: Any) -> tuple[Rule, ...]:
    """The weight map of a model with a gated MLP in every layer; `attention`: keywords of `attention_rules`."""
    first, last = outer_rules(config, "model.", "lm_head.weight")
    weight_map = list(first)
    for layer in range(config.num_hidden_layers):
        weight_map += attention_rules(config, layer, "model.", **attention)
        weight_map += mlp_rules(
            f"model.layers.{layer}.mlp.",
            f"decoder.layers.{layer}.mlp.",
            ffn=config.intermediate_size,
            hidden=config.hidden_size,
            at=Location(layer=layer),
        )
    return (*weight_map, *last)


def outer_rules(config: Any, prefix: str, head: str) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
    """Rules before the layers (embedding) and after them (final norm, head)."""
    embedding = f"{prefix}embed_tokens.weight"
    vocab = config.vocab_size
    hidden = config.hidden_size
    tied = bool(config.tie_word_embeddings)
    if tied:  # the head is loaded from the embedding, and not exported, since the folder has one tensor
        head = embedding
    at_end = Location(place="last")
    first = rules.vocabulary("embedding.word_embeddings.weight", embedding, vocab, hidden, Location(place="first"))
    norm = rules.replicated("decoder.final_layernorm.weight", f"{prefix}norm.weight", (hidden,), at_end)
    # with a pipeline Megatron-Core keeps a second copy of tied weights in the last stage
    last = rules.vocabulary("output_layer.weight", head, vocab, hidden, at_end, exported=not tied)
    return (first,), (norm, last)


def attention_rules(
    config: Any, layer: int, prefix: str, *, qk_norm: QkNorm = "none", qkv_bias: bool = False, post_norm: bool = False
) -> list[Rule]:
    """Norms and attention projections of one layer; `qk_norm` and `post_norm` as in `LayerStyle`.

    With `attention_bias` in the config all projections have biases, with `qkv_bias` all but the output's.
    """
    at = Location(layer=layer)
    hf_layer = f"{prefix}layers.{layer}."
    layer_name = f"decoder.layers.{layer}."
    hf = f"{hf_layer}self_attn."
    megatron = f"{layer_name}self_attention."
    hidden = config.hidden_size
    heads = config.num_attention_heads
    groups = key_value_heads(config)
    head_dim = head_size(config)
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    if post_norm:
        norms = {
            "self_attention.linear_proj.norm": "post_attention_layernorm",
            "mlp.linear_fc2.norm": "post_feedforward_layernorm",
        }
    weight_map = [
        rules.replicated(f"{layer_name}{name}.weight", f"{hf_layer}{hf_name}.weight", (hidden,), at)
        for name, hf_name in norms.items()
    ]
    qkv = dict(heads=heads, groups=groups, head_dim=head_dim, at=at)
    weight_map.append(rules.query_key_value(f"{megatron}linear_qkv", hf, "weight", columns=(hidden,), **qkv))
    output = f"{megatron}linear_proj"
    what = "config.json: num_attention_heads"
    weight_map.append(rules.row(f"{output}.weight", f"{hf}o_proj.weight", hidden, heads * head_dim, at, what=what))
    output_bias = bool(getattr(config, "attention_bias", False))
    if qkv_bias or output_bias:
        weight_map.append(rules.query_key_value(f"{megatron}linear_qkv", hf, "bias", columns=(), **qkv))
    if output_bias:
        # RowParallelLinear adds its bias after the reduction, so each rank holds all of it
        weight_map.append(rules.replicated(f"{output}.bias", f"{hf}o_proj.bias", (hidden,), at))
    # Heads that one weight vector covers.
    normed = {"weighted": {"q": 1, "k": 1}, "all_heads": {"q": heads, "k": groups}}.get(qk_norm, {})
    for kind, count in normed.items():
        name = f"{megatron}{kind}_layernorm.weight"
        weight_map.append(rules.replicated(name, f"{hf}{kind}_norm.weight", (head_dim * count,), at))
    return weight_map


def mlp_rules(
    hf: str, megatron: str, *, ffn: int, hidden: int, at: Location, what: str = "config.json: intermediate_size"
) -> list[Rule]:
    """Rules of a gated MLP: `hf`{gate,up,down}_proj.weight and `megatron`linear_fc{1,2}.weight."""
    gate, up, down = (f"{hf}{kind}_proj.weight" for kind in ("gate", "up", "down"))
    return [
        rules.gate_up(f"{megatron}linear_fc1.weight", gate, up, ffn=ffn, hidden=hidden, at=at, what=what),
        rules.row(f"{megatron}linear_fc2.weight", down, hidden, ffn, at, what=what),
    ]


def expert_rules(hf: str, megatron: str, *, experts: int, ffn: int, hidden: int, layer: int, what: str) -> list[Rule]:
    """Rules of experts that are separate gated MLPs: `hf`E.{gate,up,down}_proj.weight."""
    weight_map = []
    for expert in range(experts):
        at = Location(layer=layer, expert=expert)
        name = f"{megatron}experts.local_experts.{expert}."
        weight_map += mlp_rules(f"{hf}{expert}.", name, ffn=ffn, hidden=hidden, at=at, what=what)
    return weight_map


def fused_expert_rules(
    hf: str, megatron: str, *, experts: int, ffn: int, hidden: int, layer: int, what: str, transposed: bool
) -> list[Rule]:
    """Rules of experts fused into `hf`gate_up_proj and `hf`down_proj; `transposed`: stored as [in, out]."""
    weight_map = []
    sizes = dict(experts=experts, ffn=ffn, hidden=hidden)
    for projection, tensor, make_rule in (
        ("linear_fc1", "gate_up_proj", rules.fused_expert_gate_up),
        ("linear_fc2", "down_proj", rules.fused_expert_down),
    ):
        for expert in range(experts):
            name = f"{megatron}experts.local_experts.{expert}.{projection}.weight"
            at = Location(layer=layer, expert=expert)
            weight_map.append(make_rule(name, f"{hf}{tensor}", at=at, what=what, transposed=transposed, **sizes))
    return weight_map


def require_full_attention(config: Any) -> None:
    """Raises ValueError for sliding windows, and for activations other than SiLU.

    Newer configs say it for each layer in `layer_types`, older ones for all in `use_sliding_window`.
    """
    require(config, "hidden_act", "silu")
    require(config, "use_sliding_window", False)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"config.json: layer_types has {', '.join(sorted(kinds))}; full_attention alone is supported here"
        )

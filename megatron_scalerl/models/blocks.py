"""Weight-map rules and Megatron options that families share: embedding and head, attention, whole decoders."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.experts import Experts, mlp_rules
from megatron_scalerl.models.family import Family, LayerStyle, Rule, require
from megatron_scalerl.models.rope import rotary
from megatron_scalerl.models.rules import Location

READ_BY_ENGINES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, 0),
    "dual_chunk_attention_config": (None,),
    "llama_4_scaling": (None,),
    "is_causal": (True,),
    "logit_scale": (1.0,),
    "qk_norm": (False,),
    "bias": (False,),
    "mlp_bias": (False,),
    "shared_expert_intermediate_size": (0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "qkv_bias": (None, False),
}
"""Key of config.json that vLLM 0.32 reads, even if transformers ignores the key -> values that change nothing.

Source: vllm/model_executor/models/{llama,mistral,qwen2,qwen3_moe}.py, vllm/config/model.py.
"""


def head_size(config: Any) -> int:
    """Dimension of one attention head, which may differ from hidden size / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def key_value_heads(config: Any) -> int:
    """Number of key and value heads; without num_key_value_heads the number of query heads."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def build_family(
    config: Any,
    *,
    layers: tuple[LayerStyle, ...],
    rules: tuple[Rule, ...],
    transformer: dict[str, Any] | None = None,
    name: str = "",
    partial_rotary: bool = False,
    **more: Any,
) -> Family:
    """Build the Family of a config with Llama's and Qwen's keys. Whether projections have biases is read from
    `rules`.

    transformer: fields of TransformerConfig to add or replace. name: by default the config's model_type.
    partial_rotary: whether the family supports RoPE on a part of each head. more: further fields of Family. Raises
    ValueError for quantized weights, and for a key by which an engine would compute a different model than the
    trainer.
    """
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", "unknown method")
        advice = "take the bf16 release from which they were quantized"
        if method == "fp8":
            advice = "take the policy's bf16 release, or convert it (docs/families.md)"
        raise ValueError(f"config.json: the weights are quantized ({method}); {advice}")
    for key, allowed in READ_BY_ENGINES.items():
        require(config, key, *allowed)
    head_dim = head_size(config)
    rope = rotary(config, head_dim, partial=partial_rotary)
    if rope.factor != 1.0 and not all(style.rope for style in layers):
        raise ValueError(
            "config.json: rope_type: 'yarn' is not supported for a policy in which some layers have no rotary "
            "embeddings, only default, linear or llama3"
        )
    biases = {rule.megatron.rpartition(".self_attention.")[2] for rule in rules if rule.megatron.endswith(".bias")}
    return Family(
        name=name or config.model_type,
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
            add_qkv_bias="linear_qkv.bias" in biases,
            qk_layernorm=any(style.qk_norm in ("weighted", "all_heads") for style in layers),
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
        output_bias="linear_proj.bias" in biases,
        **more,
    )


def decoder_family(
    config: Any,
    *,
    layers: LayerStyle | tuple[LayerStyle, ...],
    experts: Experts | None = None,
    attention: Callable[[int, LayerStyle], list[Rule]] | None = None,
    qkv_bias: bool | None = None,
    output_bias: bool = False,
    prediction_layers: int = 0,
    passthrough: tuple[str, ...] = (),
    transformer: dict[str, Any] | None = None,
    **more: Any,
) -> Family:
    """Build the Family of a decoder with Llama's tensor names. Each layer has attention and a gated MLP or `experts`.

    layers: the style of each layer, or of all layers. attention: rules of a layer's norms and attention, by default
    `attention_rules`, with biases of queries, keys and values if `qkv_bias`, and of the output if `output_bias`.
    qkv_bias None: the family has no such biases, and `attention_bias` is refused. prediction_layers: number of
    layers of multi-token prediction, which checkpoints number after the decoder's layers, and an export copies.
    transformer, more: as in `build_family`. Raises ValueError as `build_family` and `require_full_attention` do.
    """
    require_full_attention(config)
    if isinstance(layers, LayerStyle):
        layers = (layers,) * int(config.num_hidden_layers)
    if qkv_bias is None:
        require(config, "attention_bias", False)
    if attention is None:
        biased = bool(qkv_bias)
        attention = partial(attention_rules, config, prefix="model.", qkv_bias=biased, output_bias=output_bias)

    def layer_rules(layer: int, style: LayerStyle) -> list[Rule]:
        if experts is not None and style.moe:
            mlp = experts.rules(layer, hidden)
        else:
            names = (f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp.")
            mlp = mlp_rules(*names, ffn=config.intermediate_size, hidden=hidden, at=Location(layer=layer))
        return attention(layer, style) + mlp

    hidden = config.hidden_size
    first, last = outer_rules(config, "model.", "lm_head.weight")
    weight_map = [rule for layer, style in enumerate(layers) for rule in layer_rules(layer, style)]
    predicting = range(len(layers), len(layers) + prediction_layers)
    untrained = 0
    for layer in predicting:
        # prediction layer: three norms, a projection of two hidden states to one, embedding, head, decoder layer
        untrained += 3 * hidden + 2 * hidden * hidden + 2 * config.vocab_size * hidden
        trained = [rule for rule in layer_rules(layer, layers[-1]) if not rule.frozen]
        untrained += sum(prod(shape) for rule in trained for shape in rule.hf_shapes.values())
    options = {}
    if experts is not None and any(style.moe for style in layers):
        options = dict(moe_layer_freq=[int(style.moe) for style in layers], **experts.options())
    options |= transformer or {}
    return build_family(
        config,
        layers=layers,
        rules=(*first, *weight_map, *last),
        transformer=options,
        passthrough=(*(f"model.layers.{layer}." for layer in predicting), *passthrough),
        untrained=untrained,
        **more,
    )


def outer_rules(config: Any, prefix: str, head: str) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
    """Rules of the parameters before the layers (embedding) and after the layers (final norm, head)."""
    embedding = f"{prefix}embed_tokens.weight"
    vocab = config.vocab_size
    hidden = config.hidden_size
    tied = bool(config.tie_word_embeddings)
    if tied:  # the folder has one tensor for embedding and head
        head = embedding
    at_end = Location(place="last")
    first = rules.vocabulary("embedding.word_embeddings.weight", embedding, vocab, hidden, Location(place="first"))
    norm = rules.replicated("decoder.final_layernorm.weight", f"{prefix}norm.weight", (hidden,), at_end)
    # with tied weights the head is loaded from the embedding's tensor and not exported; in a pipeline the last stage
    # has a copy
    last = rules.vocabulary("output_layer.weight", head, vocab, hidden, at_end, exported=not tied)
    return (first,), (norm, last)


def attention_rules(
    config: Any, layer: int, style: LayerStyle, *, prefix: str, qkv_bias: bool = False, output_bias: bool = False
) -> list[Rule]:
    """Rules of the norms and attention projections of one layer; biases as in `decoder_family`."""
    at = Location(layer=layer)
    hf = f"{prefix}layers.{layer}.self_attn."
    megatron = f"decoder.layers.{layer}.self_attention."
    hidden = config.hidden_size
    heads = config.num_attention_heads
    groups = key_value_heads(config)
    head_dim = head_size(config)
    weight_map = norm_rules(config, layer, prefix, style)
    qkv = dict(heads=heads, groups=groups, head_dim=head_dim, at=at)
    weight_map.append(rules.query_key_value(f"{megatron}linear_qkv", hf, "weight", columns=(hidden,), **qkv))
    output = f"{megatron}linear_proj"
    what = "config.json: num_attention_heads"
    weight_map.append(rules.row(f"{output}.weight", f"{hf}o_proj.weight", hidden, heads * head_dim, at, what=what))
    if qkv_bias:
        weight_map.append(rules.query_key_value(f"{megatron}linear_qkv", hf, "bias", columns=(), **qkv))
    if output_bias:
        # RowParallelLinear adds the bias after the sum over ranks, so each rank holds the whole bias
        weight_map.append(rules.replicated(f"{output}.bias", f"{hf}o_proj.bias", (hidden,), at))
    # Number of heads that the weight vector of a query or key norm covers.
    normed = {"weighted": {"q": 1, "k": 1}, "all_heads": {"q": heads, "k": groups}}.get(style.qk_norm, {})
    for kind, count in normed.items():
        name = f"{megatron}{kind}_layernorm.weight"
        weight_map.append(rules.replicated(name, f"{hf}{kind}_norm.weight", (head_dim * count,), at))
    return weight_map


def norm_rules(config: Any, layer: int, prefix: str, style: LayerStyle) -> list[Rule]:
    """Rules of the two norms of the hidden states in a layer."""
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    if style.post_norm:
        norms = {
            "self_attention.linear_proj.norm": "post_attention_layernorm",
            "mlp.linear_fc2.norm": "post_feedforward_layernorm",
        }
    return [
        rules.replicated(
            f"decoder.layers.{layer}.{name}.weight",
            f"{prefix}layers.{layer}.{hf_name}.weight",
            (config.hidden_size,),
            Location(layer=layer),
        )
        for name, hf_name in norms.items()
    ]


def require_full_attention(config: Any) -> None:
    """Raises ValueError for sliding windows, and for activations other than SiLU.

    Newer configs state sliding windows for each layer in `layer_types`, older ones for all layers in
    `use_sliding_window`.
    """
    require(config, "hidden_act", "silu")
    require(config, "use_sliding_window", False)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"config.json: layer_types: found {', '.join(sorted(kinds))}; only full_attention is supported"
        )

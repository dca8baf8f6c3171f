"""Rules and options that families share: embedding and head, attention, gated MLP, experts, dense models."""

from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.family import Family, LayerStyle, QkNorm, Rule, require
from megatron_scalerl.models.rope import rotary
from megatron_scalerl.models.rules import At

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
    """The Family of a config with Llama's and Qwen's keys; `transformer` adds or replaces TransformerConfig's fields.

    `more` are further fields of Family. Raises ValueError for a key with which an engine computes another model.
    """
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", "unknown method")
        raise ValueError(
            f"config.json: the weights are quantized ({method}); take the policy's bf16 release, or convert it"
        )
    for key, allowed in READ_BY_ENGINES.items():
        require(config, key, *allowed)
    head_dim, bias = head_size(config), bool(getattr(config, "attention_bias", False))
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
    """The weight map of a model with a gated MLP in every layer; `attention`: of `attention_rules`."""
    first, last = outer_rules(config, "model.", "lm_head.weight")
    found = list(first)
    for layer in range(config.num_hidden_layers):
        found += attention_rules(config, layer, "model.", **attention)
        hf, megatron = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
        found += mlp_rules(hf, megatron, ffn=config.intermediate_size, hidden=config.hidden_size, at=At(layer=layer))
    return (*found, *last)


def outer_rules(config: Any, prefix: str, head: str) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
    """Rules before the layers (embedding) and after them (final norm, head)."""
    embedding = f"{prefix}embed_tokens.weight"
    vocab, hidden, tied = config.vocab_size, config.hidden_size, bool(config.tie_word_embeddings)
    first = rules.vocabulary("embedding.word_embeddings.weight", embedding, vocab, hidden, At(place="first"))
    norm = rules.replicated("decoder.final_layernorm.weight", f"{prefix}norm.weight", (hidden,), At(place="last"))
    last = rules.vocabulary(
        "output_layer.weight", embedding if tied else head, vocab, hidden, At(place="last"), exported=not tied
    )
    return (first,), (norm, last)


def attention_rules(
    config: Any, layer: int, prefix: str, *, qk_norm: QkNorm = "none", qkv_bias: bool = False, post_norm: bool = False
) -> list[Rule]:
    """Norms and attention projections of one layer; `qk_norm` and `post_norm` as in `LayerStyle`.

    With `attention_bias` in the config all projections have biases, with `qkv_bias` all but the output's.
    """
    hf, megatron, at = f"{prefix}layers.{layer}.", f"decoder.layers.{layer}.", At(layer=layer)
    attention, ours = f"{hf}self_attn.", f"{megatron}self_attention."
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, head_size(config)
    qkv = dict(heads=heads, groups=key_value_heads(config), head_dim=head_dim, at=at)
    what = "config.json: num_attention_heads"
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    if post_norm:
        norms = {"self_attention.linear_proj.norm": "post_attention_layernorm"}
        norms |= {"mlp.linear_fc2.norm": "post_feedforward_layernorm"}
    found = [
        *(
            rules.replicated(f"{megatron}{ours}.weight", f"{hf}{theirs}.weight", (hidden,), at)
            for ours, theirs in norms.items()
        ),
        rules.query_key_value(f"{ours}linear_qkv.weight", _projections(attention, "weight"), hidden=hidden, **qkv),
        rules.row(f"{ours}linear_proj.weight", f"{attention}o_proj.weight", hidden, heads * head_dim, at, what=what),
    ]
    output_bias = bool(getattr(config, "attention_bias", False))
    if qkv_bias or output_bias:
        found.append(
            rules.query_key_value(f"{ours}linear_qkv.bias", _projections(attention, "bias"), hidden=None, **qkv)
        )
    if output_bias:
        found.append(rules.replicated(f"{ours}linear_proj.bias", f"{attention}o_proj.bias", (hidden,), at))
    if qk_norm in ("weighted", "all_heads"):
        for kind, count in (("q", config.num_attention_heads), ("k", key_value_heads(config))):
            width = head_dim * (count if qk_norm == "all_heads" else 1)
            found.append(
                rules.replicated(f"{ours}{kind}_layernorm.weight", f"{attention}{kind}_norm.weight", (width,), at)
            )
    return found


def _projections(attention: str, what: str) -> tuple[str, str, str]:
    q, k, v = (f"{attention}{kind}_proj.{what}" for kind in "qkv")
    return q, k, v


def mlp_rules(
    hf: str, megatron: str, *, ffn: int, hidden: int, at: At, what: str = "config.json: intermediate_size"
) -> list[Rule]:
    """A gated MLP: `hf`{gate,up,down}_proj.weight and `megatron`linear_fc{1,2}.weight."""
    gate, up, down = (f"{hf}{kind}_proj.weight" for kind in ("gate", "up", "down"))
    return [
        rules.gate_up(f"{megatron}linear_fc1.weight", gate, up, ffn=ffn, hidden=hidden, at=at, what=what),
        rules.row(f"{megatron}linear_fc2.weight", down, hidden, ffn, at, what=what),
    ]


def expert_rules(hf: str, megatron: str, *, experts: int, ffn: int, hidden: int, layer: int, what: str) -> list[Rule]:
    """Experts as separate gated MLPs: `hf`E.{gate,up,down}_proj.weight."""
    found = []
    for expert in range(experts):
        at = At(layer=layer, expert=expert)
        ours = f"{megatron}experts.local_experts.{expert}."
        found += mlp_rules(f"{hf}{expert}.", ours, ffn=ffn, hidden=hidden, at=at, what=what)
    return found


def fused_expert_rules(
    hf: str, megatron: str, *, experts: int, ffn: int, hidden: int, layer: int, what: str, transposed: bool
) -> list[Rule]:
    """Experts fused into `hf`gate_up_proj and `hf`down_proj; `transposed`: stored as [in, out]."""
    found = []
    for projection, tensor, kind in (
        ("linear_fc1", "gate_up_proj", rules.fused_expert_gate_up),
        ("linear_fc2", "down_proj", rules.fused_expert_down),
    ):
        for expert in range(experts):
            found.append(
                kind(
                    f"{megatron}experts.local_experts.{expert}.{projection}.weight",
                    f"{hf}{tensor}",
                    experts=experts,
                    ffn=ffn,
                    hidden=hidden,
                    at=At(layer=layer, expert=expert),
                    what=what,
                    transposed=transposed,
                )
            )
    return found


def require_full_attention(config: Any) -> None:
    """Raises ValueError for sliding windows, and for activations other than SiLU."""
    require(config, "hidden_act", "silu")
    require(config, "use_sliding_window", False)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"config.json: layer_types has {', '.join(sorted(kinds))}; full_attention alone is supported here"
        )

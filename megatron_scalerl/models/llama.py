"""Llama 2 and 3.x dense models, and the tiny dense policy."""

from __future__ import annotations

from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.family import Family, LayerStyle, Rule, require, rotary_frequencies
from megatron_scalerl.models.rules import At


def family(config: Any) -> Family:
    """The Family of a LlamaConfig. Raises ValueError for what the map does not cover (biases, other activations)."""
    for key in ("attention_bias", "mlp_bias"):
        require(config, key, False)
    require(config, "hidden_act", "silu")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    frequencies = rotary_frequencies(config, head_dim)
    return Family(
        name="llama",
        transformer=dict(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=groups,
            kv_channels=head_dim,
            ffn_hidden_size=config.intermediate_size,
            layernorm_epsilon=config.rms_norm_eps,
            init_method_std=config.initializer_range,
        ),
        gpt=dict(
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
        ),
        vocab_size=config.vocab_size,
        inv_freq=frequencies,
        layers=(LayerStyle(),) * config.num_hidden_layers,
        rules=_rules(config, head_dim=head_dim, groups=groups),
    )


def _rules(config: Any, *, head_dim: int, groups: int) -> tuple[Rule, ...]:
    found = list(outer_rules(config, "model.", "lm_head.weight")[0])
    for layer in range(config.num_hidden_layers):
        found += attention_rules(config, layer, "model.", head_dim=head_dim, groups=groups)
        hf, megatron = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
        found += mlp_rules(hf, megatron, ffn=config.intermediate_size, hidden=config.hidden_size, at=At(layer=layer))
    return (*found, *outer_rules(config, "model.", "lm_head.weight")[1])


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


def attention_rules(config: Any, layer: int, prefix: str, *, head_dim: int, groups: int) -> list[Rule]:
    """Norms and attention projections of one layer."""
    hf, megatron, at = f"{prefix}layers.{layer}.", f"decoder.layers.{layer}.", At(layer=layer)
    hidden, heads = config.hidden_size, config.num_attention_heads
    return [
        rules.replicated(f"{megatron}input_layernorm.weight", f"{hf}input_layernorm.weight", (hidden,), at),
        rules.query_key_value(
            f"{megatron}self_attention.linear_qkv.weight",
            (f"{hf}self_attn.q_proj.weight", f"{hf}self_attn.k_proj.weight", f"{hf}self_attn.v_proj.weight"),
            heads=heads,
            groups=groups,
            head_dim=head_dim,
            hidden=hidden,
            at=at,
        ),
        rules.row(
            f"{megatron}self_attention.linear_proj.weight",
            f"{hf}self_attn.o_proj.weight",
            hidden,
            heads * head_dim,
            at,
            what="config.json: num_attention_heads",
        ),
        rules.replicated(
            f"{megatron}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", (hidden,), at
        ),
    ]


def mlp_rules(
    hf: str, megatron: str, *, ffn: int, hidden: int, at: At, what: str = "config.json: intermediate_size"
) -> list[Rule]:
    """A gated MLP: `hf`{gate,up,down}_proj.weight and `megatron`linear_fc{1,2}.weight."""
    return [
        rules.gate_up(
            f"{megatron}linear_fc1.weight",
            f"{hf}gate_proj.weight",
            f"{hf}up_proj.weight",
            ffn=ffn,
            hidden=hidden,
            at=at,
            what=what,
        ),
        rules.row(f"{megatron}linear_fc2.weight", f"{hf}down_proj.weight", hidden, ffn, at, what=what),
    ]

"""Families without Megatron: rotary frequencies, the weight map cut and put together again, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import Llama4TextConfig, LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_scalerl.models import family
from megatron_scalerl.models.family import padded_vocab_size, rotary_frequencies
from megatron_scalerl.models.llama4 import attention_temperature

LLAMA: dict[str, Any] = dict(
    vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6,
)  # fmt: skip
LLAMA4: dict[str, Any] = dict(
    vocab_size=37, hidden_size=24, intermediate_size=20, intermediate_size_mlp=40, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_local_experts=3, moe_layers=[1, 3],
)  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**LLAMA),
    "llama tied": lambda: LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama4": lambda: Llama4TextConfig(**LLAMA4),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_shards_put_together_are_the_checkpoint(kind: str, size: int) -> None:
    """Every element of every tensor lies in exactly one piece, and comes back where it was."""
    found = family(CONFIGS[kind]())
    generator = torch.Generator().manual_seed(1)
    shapes = {name: shape for rule in found.rules for name, shape in rule.hf_shapes.items()}
    source = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    back = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    visits = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rule in found.rules:
        for rank in range(size):
            shard = torch.zeros(shard_shape(rule, size))
            for piece in rule.pieces(rank, size):
                piece.of_shard(shard).copy_(source[piece.hf_name][piece.hf_index])
            if rule.exported and (rule.sharded or rank == 0):
                for piece in rule.pieces(rank, size):
                    back[piece.hf_name][piece.hf_index] = piece.of_shard(shard)
                    visits[piece.hf_name][piece.hf_index] += 1
    for name in source:
        assert torch.equal(back[name], source[name]), name
        assert torch.equal(visits[name], torch.ones_like(visits[name])), name


def shard_shape(rule: Any, size: int) -> tuple[int, ...]:
    pieces = [piece for rank in range(size) for piece in rule.pieces(rank, size)]
    shape = (
        list(pieces[0].of_shard(torch.zeros(100, 100)).shape) if len(next(iter(rule.hf_shapes.values()))) > 1 else [1]
    )
    index = pieces[0].hf_index
    lengths = [part.stop - part.start for part in index if isinstance(part, slice)]
    lengths = lengths[::-1] if pieces[0].transposed else lengths
    lengths[pieces[0].axis] = max(piece.stop for piece in pieces)
    assert len(shape) == len(lengths)
    return tuple(lengths)


def test_query_key_value_rows_are_grouped() -> None:
    """Two groups of two heads of one row each: Megatron's rows are q0 q1 k0 v0 q2 q3 k1 v1."""
    config = LlamaConfig(**{**LLAMA, "head_dim": 2, "num_attention_heads": 4})
    rule = next(r for r in family(config).rules if r.megatron.endswith("layers.0.self_attention.linear_qkv.weight"))
    order = [(p.hf_name.split(".")[-2][0], p.hf_index[0].start, p.start, p.stop) for p in rule.pieces(0, 1)]
    assert order == [
        ("q", 0, 0, 4),
        ("k", 0, 4, 6),
        ("v", 0, 6, 8),
        ("q", 4, 8, 12),
        ("k", 2, 12, 14),
        ("v", 2, 14, 16),
    ]


def test_names_are_those_of_hugging_face() -> None:
    from transformers import Llama4ForCausalLM, LlamaForCausalLM

    for kind, maker in (("llama", LlamaForCausalLM), ("llama tied", LlamaForCausalLM), ("llama4", Llama4ForCausalLM)):
        config = CONFIGS[kind]()
        with torch.device("meta"):
            model = maker(config)
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        found = {name: shape for rule in family(config).rules for name, shape in rule.hf_shapes.items()}
        assert found == expected, kind


def test_llama3_scaling_equals_transformers() -> None:
    scaling = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    config = LlamaConfig(head_dim=128, rope_parameters=dict(**scaling, original_max_position_embeddings=8192))
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert torch.allclose(rotary_frequencies(config, 128), expected, rtol=1e-6)
    plain = rotary_frequencies(
        LlamaConfig(head_dim=128, rope_parameters=dict(rope_type="default", rope_theta=5e5)), 128
    )
    ratio = plain / rotary_frequencies(config, 128)
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(8.0) and 1.0 < ratio[32] < 8.0


def test_both_dialects_of_rope_are_read() -> None:
    """transformers 4 says rope_theta, transformers 5 rope_parameters: theta 100 in dimension 4 is (1, 0.1)."""
    old, new = PretrainedConfig(), PretrainedConfig()
    old.rope_theta, new.rope_parameters = 100.0, dict(rope_type="default", rope_theta=100.0)
    for config in (old, new):
        assert rotary_frequencies(config, 4).tolist() == pytest.approx([1.0, 0.1])
    new.rope_parameters = dict(rope_type="yarn", rope_theta=100.0)
    with pytest.raises(ValueError, match="rope_type: expected default, linear or llama3, found 'yarn'"):
        rotary_frequencies(new, 4)


def test_llama4_layers_differ_as_in_the_config() -> None:
    """Every fourth layer has no RoPE and no query-key norm and sees the whole sequence."""
    found = family(Llama4TextConfig(**LLAMA4))
    assert [style.moe for style in found.layers] == [False, True, False, True]
    assert [style.rope for style in found.layers] == [True, True, True, False]
    assert [style.qk_norm for style in found.layers] == [True, True, True, False]
    assert [style.chunked for style in found.layers] == [True, True, True, False]
    assert found.transformer["no_rope_freq"] == [0, 0, 0, 1]
    assert found.attention_chunk_size == 8192


def test_attention_temperature_by_hand() -> None:
    """1 + 0.1 ln(1 + floor((p + 1) / 8)): 1 up to position 6, then steps."""
    scale = attention_temperature(torch.tensor([0, 6, 7, 14, 15]), floor_scale=8.0, attn_scale=0.1)
    assert scale.tolist() == pytest.approx([1.0, 1.0, 1.0693147, 1.0693147, 1.1098612])


def test_a_vision_model_carries_its_tower() -> None:
    from transformers import Llama4Config

    found = family(Llama4Config(text_config=Llama4TextConfig(**LLAMA4)))
    assert found.carried == ("vision_model.", "multi_modal_projector.")
    assert found.rules[0].hf_shapes == {"language_model.model.embed_tokens.weight": (37, 24)}


@pytest.mark.parametrize("rank, rows", [(0, (0, 19)), (1, (19, 37))])
def test_the_vocabulary_is_padded_to_the_ranks(rank: int, rows: tuple[int, int]) -> None:
    assert padded_vocab_size(37, 2) == 38 and padded_vocab_size(38, 2) == 38
    piece = family(CONFIGS["llama"]()).rules[0].pieces(rank, 2)[0]
    assert (piece.hf_index[0].start, piece.hf_index[0].stop) == rows


def test_what_the_map_does_not_cover_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config.json: attention_bias: expected False, found True"):
        family(LlamaConfig(**LLAMA, attention_bias=True))
    with pytest.raises(ValueError, match=r"hidden_act: expected 'silu', found 'gelu'"):
        family(LlamaConfig(**LLAMA, hidden_act="gelu"))
    with pytest.raises(ValueError, match=r"model_type: expected one of llama, llama4, llama4_text, found 'mamba'"):
        unknown = PretrainedConfig()
        unknown.model_type = "mamba"
        family(unknown)
    rule = family(CONFIGS["llama"]()).rules[2]
    with pytest.raises(ValueError, match=r"num_key_value_heads: expected a multiple of the parallel size 4, found 2"):
        rule.pieces(0, 4)


def test_the_carriers_are_frozen() -> None:
    found = family(CONFIGS["llama"]())
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.name = "other"

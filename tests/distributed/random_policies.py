"""Random tiny Hugging Face policies whose logits reach 5 to 10, and fixed packed rows for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 65
"""Odd, so that two tensor-parallel ranks need a padded row."""
ROWS = ((5, 17, 31, 24), (40, 9, 20, 12))
"""Sequence lengths of the two micro-batches."""


def make(kind: str, path: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Makes and saves the policy `kind`: llama, llama_tied or llama4; returns the Hugging Face model."""
    torch.manual_seed(20251013)
    model = _llama(tied=kind == "llama_tied") if kind.startswith("llama_") or kind == "llama" else _llama4()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert "bias" not in name
    model = model.to(dtype).eval()
    model.save_pretrained(path)
    return model


def _llama(*, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            rope_parameters=dict(**scaling, original_max_position_embeddings=32) if tied else None,
        )
    )


def _llama4() -> Any:
    """Layer 1 dense, layer 3 without RoPE; chunks and temperature steps shorter than the sequences."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    return Llama4ForCausalLM(
        Llama4TextConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            intermediate_size_mlp=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            moe_layers=[0, 2, 3],
            max_position_embeddings=512,
            attention_chunk_size=16,
            floor_scale=8,
        )
    )


def rows(lengths: tuple[tuple[int, ...], ...] = ROWS) -> list[dict[str, torch.Tensor]]:
    """Packed rows of random tokens: the same tokens in sequence k of the concatenated list, however packed."""
    found, counter = [], 0
    for row in lengths:
        tokens, targets, weights = [], [], []
        for length in row:
            generator = torch.Generator().manual_seed(1000 + counter)
            ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
            weight = torch.rand(length, generator=generator) - 0.3
            weight[-1] = 0.0
            tokens, targets, weights = [*tokens, ids[:-1]], [*targets, ids[1:]], [*weights, weight]
            counter += 1
        cu_seqlens = torch.tensor([0, *row]).cumsum(0).int()
        found.append(
            dict(
                tokens=torch.cat(tokens)[None],
                position_ids=torch.cat([torch.arange(length) for length in row])[None],
                cu_seqlens=cu_seqlens,
                targets=torch.cat(targets),
                weights=torch.cat(weights),
            )
        )
    return found

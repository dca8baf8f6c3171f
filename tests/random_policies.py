"""The random policies of every family, what engines need of them, and fixed packed rows for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_scalerl.tiny.families import KINDS, VOCAB, make

__all__ = ["FOR_ENGINES", "KINDS", "LLAMA4_FOR_ENGINES", "ROWS", "make", "rows", "write_policy"]

ROWS = ((5, 17, 31, 24), (40, 9, 20, 12))
"""Sequence lengths of the two micro-batches."""
FOR_ENGINES: dict[str, Any] = dict(head_dim=32, vocab_size=64)
"""Settings that vLLM on CPUs can serve, with the vocabulary of the tiny tokenizer."""
LLAMA4_FOR_ENGINES: dict[str, Any] = dict(**FOR_ENGINES, attention_chunk_size=128, floor_scale=64)
"""Chunks of vLLM's block size on CPUs."""


def write_policy(path: Path, *, seed: int = 0) -> Path:
    """A two-layer Llama with large random weights, so that its distributions are far from uniform."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    config = KINDS["llama"](**small, max_position_embeddings=256, initializer_range=0.3, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


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

"""Synthetic inputs of the trainer's checks: widths, recipes, sequences of random tokens. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import Rollout, Sample

TOY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=512
)
"""Widths of the Llama that replaces one of full width in a rehearsal."""
WIDE: dict[str, Any] = dict(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
)
"""Widths of a small policy; supported by flash attention and Transformer Engine, also with TP 2."""
_SEED = 0


def bare_recipe(path: str | Path, dtype: str, micro_batch_tokens: int, **sections: Any) -> Recipe:
    """A recipe for a trainer only, with the policy of `path`; `sections` override the defaults.

    Raises ValueError (pydantic's) for unknown settings.
    """
    trainer = {"micro_batch_tokens": micro_batch_tokens, **sections.pop("trainer", {})}
    return Recipe.model_validate(
        {
            "name": "check_gpu",
            "steps": 2,
            "policy": {"path": str(path), "dtype": dtype},
            "prompts": {"path": "none.jsonl"},
            "trainer": trainer,
            **sections,
        }
    )


def sample(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    rollout_logprobs: Sequence[float],
    advantage: float,
    token_weight: float,
) -> Sample:
    """One completion of policy version 0 with loss on all tokens."""
    size = len(completion)
    rollout = Rollout(
        token_ids=tuple(completion),
        rollout_logprobs=tuple(rollout_logprobs),
        policy_versions=(0,) * size,
        loss_mask=(True,) * size,
        interrupted=False,
        truncated=False,
        thinking_cut=0,
        seed=0,
    )
    return Sample(prompt_token_ids=tuple(prompt), rollout=rollout, advantage=advantage, token_weight=token_weight)


def full_micro_batches(count: int, length: int, vocab: int) -> list[Sample]:
    """`count` sequences of `length` random tokens below `vocab`, an eighth of each is its prompt; weights add up to
    1.

    Micro-batches of a multiple of `length` tokens are full. The engine's log-probs are -11 nats, about those of
    random weights with a vocabulary of 100,000.
    """
    rng = random.Random(_SEED)
    prompt = length // 8
    size = length - prompt
    return [
        sample(
            rng.choices(range(vocab), k=prompt),
            rng.choices(range(vocab), k=size),
            rollout_logprobs=(-11.0,) * size,
            advantage=rng.choice((-1.0, 1.0)),
            token_weight=1.0 / (count * size),
        )
        for _ in range(count)
    ]

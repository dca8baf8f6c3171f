"""Inputs of the trainer's checks: small random policies, fixed sequences of random tokens, recipes, batches.

Imports torch only in functions: `shape_run` is imported by a process that does not import it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.batching.packing import pack
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import Batch, Rollout, Sample

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
_WIDE_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": dict(moe_intermediate_size=384),
    "llama4": dict(intermediate_size=512, intermediate_size_mlp=768, attention_chunk_size=128, floor_scale=64),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small policy and its input. Produced by `case_of`."""

    kind: str
    """Family, one of `tiny.families.KINDS`."""
    settings: Mapping[str, Any]
    """Overrides of its config."""
    std: float
    """Standard deviation of its matrices."""
    vocab: int
    lengths: tuple[int, ...]
    """Targets per sequence; each sequence has one token more."""
    micro_batch_tokens: int
    """More than the longest sequence, less than all together."""
    seed: int = 3
    """Seed of the sequences."""

    def write(self, path: str | Path) -> None:
        """Save the policy at `path` in bf16, so that both precisions start from the same weights."""
        import torch

        from megatron_scalerl.tiny import families

        families.make(self.kind, path, dtype=torch.bfloat16, std=self.std, **self.settings)

    def token_ids(self) -> list[list[int]]:
        """The sequences; deterministic."""
        rng = random.Random(self.seed)
        return [[rng.randrange(3, self.vocab) for _ in range(length + 1)] for length in self.lengths]

    def recipe(self, path: str | Path, dtype: str) -> Recipe:
        """A recipe whose first step changes the weights by a few percent, smoothly.

        With a small eps Adam's first update is the sign of the gradient, which turns rounding errors near zero into
        full updates. With an eps above the gradients the update is proportional to them. The gradient is clipped.
        """
        optimizer = {"lr": 0.05, "warmup_steps": 0, "eps": 1e-3, "clip_grad": 1.0}
        return bare_recipe(path, dtype, self.micro_batch_tokens, optimizer=optimizer)


def case_of(kind: str, *, toy: bool, small: bool = False) -> Case:
    """The case of a family.

    Its widths are supported by flash attention and Transformer Engine; `small` reduces them, `toy` is for a CPU.
    """
    from megatron_scalerl.tiny.families import VOCAB

    if toy:
        return Case(
            kind=kind, settings={}, std=0.3, vocab=VOCAB, lengths=(40, 5, 31, 12, 1, 24), micro_batch_tokens=80
        )
    settings = WIDE | _WIDE_EXTRA[kind]
    if small:
        settings |= dict(hidden_size=256, intermediate_size=512, num_attention_heads=4)
    return Case(
        kind=kind,
        settings=settings,
        std=0.08,
        vocab=settings["vocab_size"],
        lengths=(300, 17, 129, 512, 64, 1, 255),
        micro_batch_tokens=1024,
    )


def check_layers(setting: PartSetting) -> None:
    """Raises ValueError if this process would not build the part's layers (on a GPU)."""
    from megatron_scalerl.distributed import device

    if setting.on_gpu and (setting.layers == "te") != device.HAVE_TE:
        raise ValueError(f"MSRL_LAYERS: expected {setting.layers!r} for {setting.part}, found {device.LAYERS!r}")


def samples(token_ids: Sequence[Sequence[int]], rollout_logprobs: Sequence[Sequence[float]]) -> list[Sample]:
    """One sample per sequence, whose first token is the prompt; the token weights add up to 1."""
    weight = 1.0 / sum(len(row) - 1 for row in token_ids)
    return [
        sample(row[:1], row[1:], rollout_logprobs=logprobs, advantage=1.0 if index % 3 else -0.5, token_weight=weight)
        for index, (row, logprobs) in enumerate(zip(token_ids, rollout_logprobs, strict=True))
    ]


def batch_of(found: Sequence[Sample], micro_batch_tokens: int, *, step: int = 1) -> Batch:
    """The samples packed for one rank."""
    [batch] = pack(
        found, step=step, dp_size=1, micro_batch_tokens=micro_batch_tokens, pad_multiple=1, policy_version=0
    )
    return batch


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

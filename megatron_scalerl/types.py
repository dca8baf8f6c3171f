"""The carriers: one frozen dataclass for each arrow of the data's way through the house.

prompts -> rollouts -> rewards -> filters -> advantages -> batch -> trainer -> weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

ComputeUnit = Literal["gpu_hours", "device_hours"]
"""Unit of a run's compute axis: device-hours where the devices are processes on CPUs."""


class CompletionLost(RuntimeError):
    """One completion cannot be used, through no fault of the policy; `reason` says why in one word.

    It is left out of its group and counted, and its siblings stay. Raised by `engine.client` (an answer
    without log-probabilities: `no_logprobs`) and by `rewards.pool` (no process to score it: `verifier_lost`).
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, rendered and tokenised. Produced by `prompts.dataset`."""

    prompt_id: str
    """Stable identity: the hash of problem and reference answer, the same in every run and epoch."""
    text: str
    """The problem as it stands in the prompts file."""
    answer: str
    """The reference answer that the verifier compares with."""
    token_ids: tuple[int, ...]
    """[P] the rendered prompt template with the think prefill, as the engine gets it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, handed to a verifier of the user's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One completion as the engine produced it. Produced by `engine.client`."""

    token_ids: tuple[int, ...]
    """[T] completion tokens: sampled and forced ones, the end-of-sequence token included if it came."""
    rollout_logprobs: tuple[float, ...]
    """[T] raw log-probability (nats, temperature 1) under the engine that sampled the token; 0.0 where forced."""
    policy_versions: tuple[int, ...]
    """[T] version of the weights that produced each token."""
    loss_mask: tuple[bool, ...]
    """[T] True for a sampled token, False for a forced one."""
    interrupted: bool
    """True if thinking was cut and the phrase forced."""
    truncated: bool
    """True if a budget ended the completion before the policy did."""
    thinking_cut: int
    """The drawn cut point: number of thinking tokens after which the phrase is forced (0: interruption off)."""
    seed: int
    """The sampling seed of this completion."""
    expert_choices: ExpertChoices | None = None
    """With rollouts.routing_replay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertChoices:
    """The experts that the engine's routers chose for the tokens of one completion. Produced by `rollouts`."""

    layers: int
    """L, all layers of the policy; what stands at a dense layer means nothing."""
    topk: int
    """K, experts a token."""
    width: Literal[1, 2]
    """Bytes of one number, little-endian and unsigned."""
    data: bytes
    """[P + T - 1, L, K] expert of each token of prompt and completion but the last, which no layer has seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The score of one completion. Produced by `rewards.pool`."""

    correct: bool
    """True if the answer was accepted. A truncated completion is never correct."""
    reward: float
    """The reward that enters the advantage (recipe: rewards.correct / rewards.incorrect)."""
    reason: str = ""
    """Why, in one word where it is not a plain comparison: timeout, memory, crash, error, no_answer, truncated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All completions of one prompt in one visit. Produced by `rollouts.stream`."""

    group_id: int
    """Number of the group in the order of admission, from 0, unique in a run's lineage."""
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    """[G] at least one; fewer than rollouts.group_size where completions were lost."""
    scores: tuple[Score, ...]
    """[G]"""
    first_token_version: int
    """Oldest policy version among the first tokens of its completions."""
    epoch: int
    """Pass over the training prompts in which the prompt was drawn, from 0."""
    lost_completions: int = 0
    """Completions that were left out of the group (`CompletionLost`)."""

    @property
    def pass_rate(self) -> float:
        """Share of correct completions, truncated ones counted as wrong, lost ones not counted."""
        return sum(s.correct for s in self.scores) / len(self.scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion that trains. Produced by `advantages`."""

    prompt_token_ids: tuple[int, ...]
    """[P]"""
    rollout: Rollout
    advantage: float
    """Normalised advantage, the same for every token of the completion."""
    token_weight: float
    """Weight of each loss-mask token in the summed loss, for example 1 / (N_eff * T_p) for prompt mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Several samples packed into one row. Produced by `batch`; arrays are numpy, N tokens, S sequences.

    Position i holds token i as input and what belongs to predicting token i+1 of the same sequence as
    target: `targets[i]`, `loss_mask[i]`, `rollout_logprobs[i]` ... all describe the token that position i
    predicts. The last position of every sequence and all padding have loss_mask False and weight 0.
    """

    tokens: np.ndarray
    """[N] int64 input tokens, padding included."""
    position_ids: np.ndarray
    """[N] int64, from 0 in each sequence."""
    cu_seqlens: np.ndarray
    """[S+1] int32 sequence starts; padding at the end is a sequence of its own."""
    targets: np.ndarray
    """[N] int64 next token of the same sequence, 0 where there is none."""
    loss_mask: np.ndarray
    """[N] bool"""
    rollout_logprobs: np.ndarray
    """[N] float32, 0 where loss_mask is False."""
    advantages: np.ndarray
    """[N] float32"""
    token_weights: np.ndarray
    """[N] float32, 0 where loss_mask is False."""
    staleness: np.ndarray
    """[N] int32 optimiser steps from the version that sampled the target to the one that trains, -1 off mask."""
    expert_choices: np.ndarray | None = None
    """[N, L, K] int32 expert of each token as the engine chose it, -1 where the trainer's router shall choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one data-parallel rank trains on in one optimiser step. Produced by `batch`."""

    step: int
    """The step that this batch makes, from 1; it turns policy version step-1 into step."""
    micro_batches: tuple[MicroBatch, ...]
    """The same number on every data-parallel rank; fillers carry zero weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What came of one optimiser step. Produced by `trainer.step`, summed over all ranks."""

    step: int
    policy_version: int
    """Version of the weights after the step."""
    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    tokens: int
    """Tokens in the batch with prompts, without padding, over all data-parallel ranks."""
    seconds: float
    """Wall time of forward, backward and optimiser on the slowest rank."""
    metrics: Mapping[str, float]
    """Named scalars: entropy, mismatch by staleness bucket, share of capped weights ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRate:
    """One validation: mean@k on the held-out prompts at one policy version. Produced by `validation`."""

    step: int
    policy_version: int
    pass_rate: float
    """Mean over prompts and generations, truncated completions counted as wrong."""
    prompts: int
    generations: int
    """Completions per prompt (k)."""
    gpu_hours: float
    """GPU-hours up to here without validation (device-hours without GPUs)."""
    gpu_hours_total: float
    """GPU-hours up to here with validation."""
    truncated_share: float
    interrupted_share: float
    mean_completion_tokens: float
    entropy: float | None = None
    """Minus the mean log-probability (nats) of all sampled tokens, forced ones left out, under the engine. An
    estimate of the policy's entropy per token on held-out prompts."""
    lost_completions: int = 0
    """Completions that could not be had (`CompletionLost`); the pass rate is that of the others."""

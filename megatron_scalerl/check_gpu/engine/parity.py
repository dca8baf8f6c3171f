"""Log-probabilities of two implementations: how far apart they are, and how far rounding alone brings them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_scalerl.check_gpu.engine.random_policy import Reference
from megatron_scalerl.check_gpu.findings import Recorder, finite
from megatron_scalerl.controller.probe import TOLERANCE
from megatron_scalerl.types import Rollout

EXACT = 1e-4
"""Nats; the largest distance of two fp32 implementations of a small policy."""
ROUNDINGS = 3.0
"""In bfloat16 the mean distance of two implementations may be this many times that of one from fp32: two independent
roundings make 2 ** 0.5, and one of the two may keep more intermediate results in bfloat16 than transformers does."""


@dataclass(frozen=True, kw_only=True)
class LogprobGap:
    """|a - b| over tokens (nats)."""

    mean: float
    median: float
    largest: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far apart two implementations may be."""

    statistic: Literal["mean", "largest"]
    """Of a `LogprobGap`."""
    nats: float
    why: str

    def of(self, found: LogprobGap) -> float:
        """What is bounded of `found` (nats)."""
        return found.mean if self.statistic == "mean" else found.largest


def gap(a: Sequence[float], b: Sequence[float]) -> LogprobGap:
    """Of two lists of log-probs of the same tokens."""
    found = [abs(x - y) for x, y in zip(a, b, strict=True)]
    finite = all(map(math.isfinite, found)) and bool(found)
    return LogprobGap(
        mean=statistics.fmean(found) if finite else math.nan,
        median=statistics.median(found) if finite else math.nan,
        largest=max(found) if finite else math.nan,
        tokens=len(found),
    )


def sampled(rollout: Rollout, logprobs: Sequence[float]) -> list[float]:
    """Those of `logprobs` [T] whose token was sampled and not forced."""
    return [value for value, kept in zip(logprobs, rollout.loss_mask, strict=True) if kept]


def bound_for(
    dtype: str, reference: Reference, prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]
) -> Bound:
    """The bound for policies of `dtype`, measured for bfloat16 on these completions by transformers on the CPU."""
    if dtype == "float32":
        return Bound(statistic="largest", nats=EXACT, why="two fp32 implementations of a small policy")
    exact: list[float] = []
    rounded: list[float] = []
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        exact += reference.logprobs(prompt, rollout.token_ids)
        rounded += reference.rounded(prompt, rollout.token_ids)
    mean = gap(exact, rounded).mean
    return Bound(
        statistic="mean",
        nats=ROUNDINGS * mean,
        why=f"{ROUNDINGS:g} x {mean:.2g}, what bfloat16 changes in transformers on the CPU",
    )


def record_gap(
    record: Recorder, check: str, found: LogprobGap, bound: Bound, detail: str, dtype: str, **data: object
) -> None:
    """Passes within the bound; in bfloat16 no token may be further away than the probe's own tolerance either."""
    text = f"{detail}: median {found.median:.2g}, mean {found.mean:.2g}, largest {found.largest:.2g} nats"
    both = finite({"gap": asdict(found), "bound": asdict(bound), **data})
    if found.largest > TOLERANCE[dtype]:
        record.holds(check, False, f"{text}; expected at most {TOLERANCE[dtype]} for every token", data=both)
    else:
        record.measured(
            check, bound.of(found), "nats", at_most=bound.nats, detail=f"{text}; bound: {bound.why}", data=both
        )

"""The metrics of one optimizer step: accumulated on the device, reduced over all ranks once.

Each metric is a `Metric`, which consists of scalars, their reduction and a value computed from reduced scalars. A
micro-batch adds to a vector of sums and a vector of maxima on the device; the host reads both back once, at the end
of the step. No metric takes part in the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.losses.inputs import LossInputs, LossOutput, log_ratio
from megatron_scalerl.trainer.staging import staged

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX
Scalar = Any
"""A 0-dimensional fp64 tensor on the device during the step, a float after the reduction."""


@dataclass(frozen=True)
class Metric:
    """A metric: scalars that one operation reduces over micro-batches and ranks, and the value of reduced scalars."""

    op: ClassVar[Any]
    """Operation that reduces the scalars over micro-batches and ranks: SUM or MAX."""

    @property
    def parts(self) -> tuple[Scalar, ...]:
        """The scalars, in the order of the fields."""
        return tuple(vars(self).values())

    def value(self) -> float:
        """The metric's value, computed from the reduced scalars."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sum(Metric):
    """A total over micro-batches and ranks."""

    op = SUM
    total: Scalar

    def value(self) -> float:
        """Sum over micro-batches and ranks."""
        return self.total


@dataclass(frozen=True)
class Mean(Metric):
    """A mean, total / count; 0 for a count of 0."""

    op = SUM
    total: Scalar
    count: Scalar

    def value(self) -> float:
        """The mean, total / count; 0 for a count of 0."""
        return self.total / max(self.count, 1.0)


@dataclass(frozen=True)
class EffectiveSampleSize(Metric):
    """Effective sample size of importance weights as a share of the number of weights; 0 without weights."""

    op = SUM
    total: Scalar
    squares: Scalar
    count: Scalar

    def value(self) -> float:
        """(sum of weights)^2 / (count x sum of squared weights)."""
        if not self.squares:
            return 0.0
        return self.total**2 / (max(self.count, 1.0) * self.squares)


@dataclass(frozen=True)
class Max(Metric):
    """A maximum over micro-batches and ranks of values that are not negative; 0 without values."""

    op = MAX
    largest: Scalar

    def value(self) -> float:
        """The maximum."""
        return self.largest

    @classmethod
    def of(cls, values: Tensor) -> Max:
        """The maximum of `values` [K], which may be empty."""
        if not values.numel():
            return cls(values.new_zeros(()))
        return cls(values.max())


Kinds = Mapping[str, type[Metric]]
OF_LOSS: Mapping[str, type[Metric]] = {"sum": Sum, "mean": Mean, "max": Max}
"""Kind of a metric in `ScaleRL.metrics` -> type of the metric."""

STALENESS_BUCKETS: tuple[tuple[str, int], ...] = (("0", 0), ("1", 1), ("2", 2), ("3_4", 4), ("5_8", 8))
"""Name and largest staleness (optimizer steps) of each bucket; older tokens fall into `over_8`."""
_BUCKETS = (*(name for name, _ in STALENESS_BUCKETS), "over_8")

MICRO_BATCH_METRICS: Kinds = {
    "loss": Sum,
    "loss_tokens": Sum,
    "entropy": Mean,
    "mismatch_mean": Mean,
    "mismatch_max": Max,
    "kl_k3": Mean,
    "capped_share": Mean,
    "is_weight_mean": Mean,
    "is_weight_max": Max,
    "ess": EffectiveSampleSize,
    "token_staleness_mean": Mean,
    "token_staleness_max": Max,
} | {
    f"{name}_staleness_{bucket}": kind
    for bucket in _BUCKETS
    for name, kind in (("mismatch", Mean), ("loss_tokens", Sum))
}
STEP_METRICS: Kinds = {"tokens": Sum, "seconds": Max, "weights_changed": Mean}
"""Metrics that are added once for a step. `reduced` needs weights_changed, to which all ranks add, at the end."""


class StepMetrics:
    """The metrics of one step on one rank."""

    def __init__(self, device: torch.device, of_loss: Mapping[str, str] | None = None):
        """of_loss: the loss's own metrics, as `ScaleRL.metrics`."""
        self._loss_kinds = {name: OF_LOSS[kind] for name, kind in (of_loss or {}).items()}
        self._kinds = {**MICRO_BATCH_METRICS, **{f"loss/{name}": kind for name, kind in self._loss_kinds.items()}}
        self._vectors = {
            op: torch.zeros(_length(self._kinds, op), dtype=torch.float64, device=device) for op in (SUM, MAX)
        }
        self._edges = staged(torch.tensor([last for _, last in STALENESS_BUCKETS], dtype=torch.int32), device)

    @torch.no_grad()
    def add(self, inputs: LossInputs, output: LossOutput, entropy: Tensor, staleness: Tensor, places: Tensor) -> None:
        """Add one micro-batch: `entropy` [N] nats, `staleness` [N] optimizer steps, -1 off the loss mask.

        `places` [K] int64 holds the positions of the loss mask. Indexing by the mask would make the host
        wait for the number of positions.
        """
        metrics = _micro_batch_metrics(inputs, output, entropy, staleness, places, self._edges)
        for name, kind in self._loss_kinds.items():
            values = output.metrics[name].index_select(0, places).double()
            if kind is Max:
                metrics[f"loss/{name}"] = Max.of(values)
            elif kind is Mean:
                metrics[f"loss/{name}"] = Mean(values.sum(), inputs.loss_mask.sum().double())
            else:
                metrics[f"loss/{name}"] = Sum(values.sum())
        self._vectors[SUM] += _flat(metrics, SUM)
        torch.maximum(self._vectors[MAX], _flat(metrics, MAX), out=self._vectors[MAX])

    def reduced(self, *, counts: bool, tokens: int, seconds: float, changes: Tensor) -> dict[str, float]:
        """The metrics over all ranks of the world, equal on every rank. Collective.

        `counts` is True on one rank of each model replica; only that rank's sums are added, so no token counts twice.
        `tokens`: of that rank's batch, prompts included. `seconds`: this rank's wall time, reduced to the maximum.
        `changes` [2]: how many elements of the weights changed, of how many that this rank wrote. The result lacks
        buckets of staleness without tokens, and lacks `weights_changed` if no element was written.
        """
        metrics = _named(self._kinds, self._vectors)
        sums = self._vectors[SUM]
        metrics["tokens"] = Sum(sums.new_full((), tokens))
        metrics["seconds"] = Max(sums.new_full((), seconds))
        metrics["weights_changed"] = Mean(*changes.unbind())
        vectors = {op: _flat(metrics, op) for op in (SUM, MAX)}
        # The last two sums are `changes`. Each rank counts only the weights that the rank writes, so all ranks add.
        if not counts:
            vectors[SUM][: -len(changes)].zero_()
        if dist.get_world_size() > 1:
            for op, vector in vectors.items():
                dist.all_reduce(vector, op=op)
        # Both vectors are read as one, so that the host waits for the device only once.
        read = torch.cat([vectors[SUM], vectors[MAX]]).tolist()
        split = len(vectors[SUM])
        reduced = _named({**self._kinds, **STEP_METRICS}, {SUM: read[:split], MAX: read[split:]})
        values = {name: metric.value() for name, metric in reduced.items()}
        for bucket in _BUCKETS:
            if not values[f"loss_tokens_staleness_{bucket}"]:
                del values[f"loss_tokens_staleness_{bucket}"], values[f"mismatch_staleness_{bucket}"]
        if not read[split - 1]:
            del values["weights_changed"]
        return values


def _micro_batch_metrics(
    inputs: LossInputs, output: LossOutput, entropy: Tensor, staleness: Tensor, places: Tensor, edges: Tensor
) -> dict[str, Metric]:
    """The metrics MICRO_BATCH_METRICS of one micro-batch. edges: largest staleness of each bucket."""
    log_ratios = log_ratio(inputs).index_select(0, places).double()
    mismatch = (inputs.trainer_logprobs - inputs.rollout_logprobs).index_select(0, places).abs().double()
    weights = output.is_weights.index_select(0, places).double()
    age = staleness.index_select(0, places)
    tokens = inputs.loss_mask.sum().double()
    weight = weights.sum()
    metrics: dict[str, Metric] = {
        "loss": Sum(output.loss.detach().double()),
        "loss_tokens": Sum(tokens),
        "entropy": Mean(entropy.index_select(0, places).sum(dtype=torch.float64), tokens),
        "mismatch_mean": Mean(mismatch.sum(), tokens),
        "mismatch_max": Max.of(mismatch),
        "kl_k3": Mean((log_ratios.expm1() - log_ratios).sum(), tokens),
        "capped_share": Mean(output.capped.index_select(0, places).sum().double(), tokens),
        "is_weight_mean": Mean(weight, tokens),
        "is_weight_max": Max.of(weights),
        "ess": EffectiveSampleSize(weight, weights.square().sum(), tokens),
        "token_staleness_mean": Mean(age.sum().double(), tokens),
        "token_staleness_max": Max.of(age.double()),
    }
    bucket = torch.bucketize(age.int(), edges)
    zeros = mismatch.new_zeros(len(_BUCKETS))
    counts = zeros.index_add(0, bucket, torch.ones_like(mismatch))
    for name, total, count in zip(_BUCKETS, zeros.index_add(0, bucket, mismatch), counts):
        metrics[f"mismatch_staleness_{name}"] = Mean(total, count)
        metrics[f"loss_tokens_staleness_{name}"] = Sum(count)
    return metrics


def _length(kinds: Kinds, op: Any) -> int:
    """Number of scalars that the operation `op` reduces."""
    return sum(len(fields(kind)) for kind in kinds.values() if kind.op == op)


def _flat(metrics: Mapping[str, Metric], op: Any) -> Tensor:
    """All scalars that the operation `op` reduces, as one vector in the order of the metrics."""
    return torch.stack([part for metric in metrics.values() if metric.op == op for part in metric.parts])


def _named(kinds: Kinds, vectors: Mapping[Any, Iterable[Scalar]]) -> dict[str, Metric]:
    """The inverse of `_flat`: metrics by name, from the vector of each operation."""
    parts = {op: iter(vector) for op, vector in vectors.items()}
    return {name: kind(*islice(parts[kind.op], len(fields(kind)))) for name, kind in kinds.items()}

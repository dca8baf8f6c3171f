"""What the planner assumes because nobody can compute it: one field, one flag, one source each."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any


def _assumed(value: Any, unit: str, what: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "what": what, "source": source})


_OURS = "ours, until it is measured"


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Every field is a flag of `tools/plan.py`; None stands for "computed"."""

    dense_utilisation: float = _assumed(
        0.40,
        "of bf16 peak",
        "trainer's hardware FLOPs, dense policy",
        "Llama 3 pretraining: 38 to 43 % (arXiv 2407.21783, table 4)",
    )
    moe_utilisation: float = _assumed(0.25, "of bf16 peak", "trainer's hardware FLOPs, mixture of experts", _OURS)
    train_seconds: float | None = _assumed(None, "s", "trainer's seconds a step", "computed from FLOPs")
    packing: float = _assumed(0.9, "share", "filled part of a micro-batch", _OURS)
    hbm_efficiency: float = _assumed(0.6, "of HBM rate", "engine's reads while it decodes", _OURS)
    engine_step_ms: float = _assumed(5.0, "ms", "fixed cost of one decoding step", _OURS)
    engine_tokens_per_second: float | None = _assumed(
        None,
        "tok/s a GPU",
        "engine's rate under full load",
        "computed from memory traffic",
    )
    publish_seconds: float | None = _assumed(
        None,
        "s",
        "engines' pause for one weight update",
        "one sender's card at half its rate",
    )
    prompt_tokens: float = _assumed(256, "tokens", "mean prompt", _OURS)
    thinking_median: float = _assumed(0.4, "of the cut", "median thinking without the cut, log-normal", _OURS)
    thinking_sigma: float = _assumed(0.6, "", "spread of the logarithm of thinking", _OURS)
    answer_median: float = _assumed(0.2, "of answer_tokens", "median answer, log-normal, sigma 0.5", _OURS)
    kept_share: float = _assumed(
        1.0,
        "share",
        "completions that the filters leave to the trainer",
        "upper bound; the paper prints none",
    )
    runtime_gib: float = _assumed(
        3.0,
        "GiB a rank",
        "CUDA context, NCCL and library buffers",
        _OURS,
    )
    fragmentation: float = _assumed(
        0.08,
        "share",
        "allocator's loss on what is not static",
        _OURS,
    )
    expert_imbalance: float = _assumed(
        1.5,
        "x mean",
        "tokens of the busiest expert rank",
        _OURS,
    )
    engine_overhead_gib: float = _assumed(
        4.0,
        "GiB a GPU",
        "engine's activations, CUDA graphs, fp32 head",
        _OURS,
    )


def described() -> tuple[Field[Any], ...]:
    """The fields in order; `metadata` has unit, what and source."""
    return fields(Assumptions)

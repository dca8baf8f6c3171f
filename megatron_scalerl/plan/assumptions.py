"""The planner's assumptions, for figures that cannot be computed: each is a field and a flag, and has a source."""

import math
from dataclasses import Field, field, fields
from typing import Any, Literal

from megatron_scalerl.record import record

_POSITIVE = (0.0, None, False)
_AT_LEAST_0 = (0.0, None, True)
_AT_LEAST_1 = (1.0, None, True)
_SHARE = (0.0, 1.0, False)
"""(Minimum, maximum or None, whether the minimum itself is allowed)."""


def _assumed(value: Any, unit: str, what: str, source: str, range_: Any = _AT_LEAST_0) -> Any:
    return field(default=value, metadata={"unit": unit, "what": what, "source": source, "range": range_})


_OURS = "project default, not measured"


@record
class Assumptions:
    """Every field is a flag of `megatron-scalerl plan` and a key of an assumptions file; None means computed.

    Raises ValueError for a number outside its field's range.
    """

    dense_utilization: float = _assumed(
        0.40,
        "of bf16 peak",
        "trainer's hardware FLOPs, dense policy",
        "Llama 3 pretraining: 38 to 43 % (arXiv 2407.21783, table 4)",
        _SHARE,
    )
    moe_utilization: float = _assumed(
        0.25, "of bf16 peak", "trainer's hardware FLOPs, mixture of experts", _OURS, _SHARE
    )
    train_seconds: float | None = _assumed(None, "s", "trainer's seconds per step", "computed from FLOPs", _POSITIVE)
    packing: float = _assumed(0.9, "share", "share of a micro-batch filled with tokens", _OURS, _SHARE)
    hbm_efficiency: float = _assumed(0.6, "of HBM rate", "memory bandwidth that decode reaches", _OURS, _SHARE)
    engine_step_ms: float = _assumed(5.0, "ms", "fixed time of one decode step", _OURS)
    engine_tokens_per_second: float | None = _assumed(
        None, "tok/s per GPU", "engine's decode throughput at full load", "computed from memory traffic", _POSITIVE
    )
    publish_seconds: float | None = _assumed(
        None,
        "s",
        "engines' pause for one weight update",
        "computed from bytes, one card per GPU at half its rate",
    )
    prompt_tokens: float = _assumed(256, "tokens", "mean prompt length", _OURS)
    thinking_median: float = _assumed(
        0.4, "of the cut", "median thinking length without interruption, log-normal", _OURS, _POSITIVE
    )
    thinking_sigma: float = _assumed(0.6, "", "standard deviation of log thinking length", _OURS)
    answer_median: float = _assumed(0.2, "of answer_tokens", "median answer length, log-normal, sigma 0.5", _OURS)
    kept_share: float = _assumed(
        1.0, "share", "completions that pass the filters", "upper bound; the paper prints none", _SHARE
    )
    runtime_gib: float = _assumed(3.0, "GiB per rank", "CUDA context, NCCL and library buffers", _OURS)
    fragmentation: float = _assumed(0.08, "share", "allocator overhead on temporary memory", _OURS)
    expert_imbalance: float = _assumed(
        1.5, "x mean", "tokens on the busiest expert-parallel rank", _OURS, _AT_LEAST_1
    )
    engine_overhead_gib: float = _assumed(4.0, "GiB per GPU", "engine's activations, CUDA graphs, fp32 head", _OURS)
    turns: float = _assumed(3, "", "mean turns of an episode, with an environment", _OURS, _AT_LEAST_1)
    reply_tokens: float = _assumed(128, "tokens", "mean tokens of the environment between two turns", _OURS)
    reply_seconds: float = _assumed(0.5, "s", "mean wait for the environment between two turns", _OURS)

    def __post_init__(self) -> None:
        for f in described():
            if getattr(self, f.name) is not None:
                check_number(f.name, getattr(self, f.name))


OF_EPISODES = ("turns", "reply_tokens", "reply_seconds")
"""The fields that count only with an environment."""


@record
class Origin:
    """Origin of an assumption's value."""

    kind: Literal["default", "file", "flag"]
    source: str
    """Where the value comes from, in words for the printed table."""


def described() -> tuple[Field[Any], ...]:
    """The fields in order; `metadata` holds unit, what, source and range."""
    return fields(Assumptions)


def default_origins() -> dict[str, Origin]:
    """The planner's own source of every assumption."""
    return {f.name: Origin(kind="default", source=f.metadata["source"]) for f in described()}


def check_number(name: str, value: object) -> float:
    """`value` as a number for the field `name`.

    Raises ValueError, in one line without the field's name, for anything but a finite number within its range.
    """
    # One check for flags, files and programs: the range stands with the field.
    ranges = {f.name: f.metadata["range"] for f in described()}
    low, high, closed = ranges[name]
    least = "of at least" if closed else "above"
    most = f" and at most {high:g}" if high else ""
    number = math.nan  # compares false with every bound
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if not (low <= number <= (high or 1e308)) or (number == low and not closed):
        raise ValueError(f"{repr(value)[:60]} is not a number {least} {low:g}{most}")
    return float(number)

"""The planner's assumptions about figures that cannot be computed.

Each assumption is a field of `Assumptions` and a flag of the command, and has a source."""

from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Annotated, Any

from pydantic import ConfigDict, ValidationError
from pydantic import Field as Range
from pydantic.dataclasses import dataclass

_Positive = Annotated[float, Range(gt=0)]
_AtLeast0 = Annotated[float, Range(ge=0)]
_AtLeast1 = Annotated[float, Range(ge=1)]
_Share = Annotated[float, Range(gt=0, le=1)]


def _assumed(value: Any, unit: str, meaning: str, source: str = "project default, not measured") -> Any:
    return field(default=value, metadata={"unit": unit, "what": meaning, "source": source})


@dataclass(frozen=True, kw_only=True, slots=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class Assumptions:
    """The values of all assumptions. None means that the planner computes the value.

    Every field is a flag of `megatron-scalerl plan` and a key of an assumptions file. Raises pydantic's
    ValidationError for a number outside its field's range; `checked` turns it into one line.
    """

    dense_utilization: _Share = _assumed(
        0.40,
        "of bf16 peak",
        "trainer's hardware FLOP/s, dense policy",
        "Llama 3 pretraining: 38 to 43 % (arXiv 2407.21783, table 4)",
    )
    moe_utilization: _Share = _assumed(0.25, "of bf16 peak", "trainer's hardware FLOP/s, mixture of experts")
    train_seconds: _Positive | None = _assumed(None, "s", "trainer's seconds per step", "computed from FLOPs")
    packing: _Share = _assumed(0.9, "share", "share of a micro-batch filled with tokens")
    hbm_efficiency: _Share = _assumed(0.6, "of HBM rate", "memory bandwidth that decoding reaches")
    engine_step_ms: _AtLeast0 = _assumed(5.0, "ms", "time of a decode step besides memory reads")
    engine_tokens_per_second: _Positive | None = _assumed(
        None, "tok/s per GPU", "engine's decode throughput at full load", "computed from memory traffic"
    )
    publish_seconds: _AtLeast0 | None = _assumed(
        None,
        "s",
        "engines' pause for one weight update",
        "computed from the bytes sent, at half the rate of a GPU's network card",
    )
    prompt_tokens: _AtLeast0 = _assumed(256, "tokens", "mean prompt length")
    thinking_median: _Positive = _assumed(
        0.4, "of the cut", "median thinking length without interruption, log-normal"
    )
    thinking_sigma: _AtLeast0 = _assumed(0.6, "", "standard deviation of log thinking length")
    answer_median: _AtLeast0 = _assumed(0.2, "of answer_tokens", "median answer length, log-normal, sigma 0.5")
    kept_share: _Share = _assumed(
        1.0, "share", "generated completions that are trained", "upper bound; the ScaleRL paper gives no value"
    )
    runtime_gib: _AtLeast0 = _assumed(3.0, "GiB per rank", "CUDA context, NCCL and library buffers")
    fragmentation: _AtLeast0 = _assumed(0.08, "share", "allocator overhead on temporary memory")
    expert_imbalance: _AtLeast1 = _assumed(1.5, "x mean", "experts' tokens on the busiest expert-parallel rank")
    engine_overhead_gib: _AtLeast0 = _assumed(4.0, "GiB per GPU", "engine's activations, CUDA graphs, fp32 head")
    turns: _AtLeast1 = _assumed(3, "", "mean turns of an episode, with an environment")
    reply_tokens: _AtLeast0 = _assumed(128, "tokens", "mean tokens of the environment between two turns")
    reply_seconds: _AtLeast0 = _assumed(0.5, "s", "mean wait for the environment between two turns")


OF_EPISODES = ("turns", "reply_tokens", "reply_seconds")
"""Fields of `Assumptions` that have an effect only if the recipe has an environment."""


def described() -> tuple[Field[Any], ...]:
    """The fields of `Assumptions` in order. Their `metadata` holds unit, description, source and range."""
    return fields(Assumptions)


def default_sources() -> dict[str, str]:
    """Name of each assumption -> source of its default."""
    return {f.name: f.metadata["source"] for f in described()}


def checked(values: Mapping[str, Any]) -> Assumptions:
    """The `Assumptions` with `values`. Absent fields have defaults. Raises ValueError for an invalid value, in one
    line with the field's name."""
    try:
        return Assumptions(**values)
    except ValidationError as error:
        raise ValueError(first_line(error)) from None


def first_line(error: ValidationError) -> str:
    """The first mistake that pydantic found, as text: the key, the value, and the requirement."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['input']!r:.60}: {first['msg']}"

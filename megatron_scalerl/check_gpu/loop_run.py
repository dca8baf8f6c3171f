"""Runs of the tiny recipe through the command line, and their results read from the run's files."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.findings import finite
from megatron_scalerl.check_gpu.programs import CommandResult, cause, read_log, run_command, serving_facts
from megatron_scalerl.checkpoints.jsonl import read_jsonl

_SFT_LOSS = re.compile(r"sft step \d+/\d+ +loss ([\d.naif-]+)")


async def command(arguments: Sequence[str], log: Path, *, limit_s: float) -> CommandResult:
    """Run `python -m megatron_scalerl ARGUMENTS` with its output in `log`."""
    return await run_command([sys.executable, "-m", "megatron_scalerl", *arguments], log, limit_s=limit_s)


def sft_losses(output: str) -> list[float]:
    """Losses (nats per token) in the progress lines of a warm start."""
    return [float(value) for value in _SFT_LOSS.findall(output)]


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """Results of a run. Produced by `read_run`."""

    ended: str
    """Why the run failed; "" for a successful run."""
    seconds: float
    steps: int
    """Optimizer steps."""
    fresh: tuple[tuple[int, float, float], ...]
    """(step, mean |trainer - engine log-prob| (nats), tokens), on tokens of staleness 0."""
    step_seconds: tuple[float, ...]
    """Of each step; the rest of `seconds` is startup, validation and shutdown."""
    probe: float
    """Largest mismatch on the probe (nats); NaN without a probe."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    pass_rates: tuple[float, ...]
    """Of each validation, on held-out prompts."""
    facts: dict[str, str]
    """See `programs.serving_facts`."""

    @property
    def mismatch(self) -> float:
        """Mean over all steps (nats); NaN without tokens."""
        return self.mismatch_until(self.steps)

    @property
    def mismatch_tokens(self) -> float:
        """Tokens of `mismatch`."""
        return sum(tokens for _, _, tokens in self.fresh)

    def mismatch_until(self, step: int) -> float:
        """Mean over the tokens up to `step` (nats); NaN without tokens."""
        counted = [(mean, tokens) for at, mean, tokens in self.fresh if at <= step]
        tokens = sum(number for _, number in counted)
        return sum(mean * number for mean, number in counted) / tokens if tokens else math.nan

    def expected_seconds(self, steps: int) -> float:
        """Estimate for the same run with that many steps; NaN if this run failed."""
        if self.ended or not self.step_seconds:
            return math.nan
        stepping = sum(self.step_seconds)
        return self.seconds - stepping + steps * stepping / len(self.step_seconds)

    def data(self) -> dict[str, Any]:
        """For a finding; JSON types."""
        found: dict[str, Any] = finite(
            {
                "seconds": self.seconds,
                "step_seconds": self.step_seconds,
                "steps": self.steps,
                "mismatch_mean": self.mismatch,
                "mismatch_tokens": self.mismatch_tokens,
                "probe_max": self.probe,
                "rewards": self.rewards,
                "pass_rates": self.pass_rates,
                **self.facts,
            }
        )
        return found


def read_run(folder: Path, done: CommandResult) -> LoopRun:
    """Read the files of a run, even of one that was killed. done: result of its command."""
    rows = [r for r in _rows(folder / "metrics.jsonl") if "skipped" not in r]
    fresh = [
        (int(r["step"]), _number(r, "mismatch_staleness_0"), float(r[count]))
        for r in rows
        if (count := "loss_tokens_staleness_0") in r
    ]
    ended = done.failure()
    if ended:
        logs = sorted((folder / "logs").glob("*.log"))
        causes = [f"{log.stem}: {cause(text)}" for log in logs if "Error" in (text := read_log(log))]
        ended = "; ".join([ended, *causes])
    return LoopRun(
        ended=ended,
        seconds=done.seconds,
        steps=max((r["step"] for r in rows), default=0),
        fresh=tuple(fresh),
        step_seconds=tuple(_number(r, "step_seconds") for r in rows if "step_seconds" in r),
        probe=max((_number(r, "probe_mismatch_max") for r in rows if "probe_mismatch_max" in r), default=math.nan),
        rewards=tuple(_number(r, "reward") for r in rows),
        pass_rates=tuple(r["pass_rate"] for r in _rows(folder / "validation.jsonl")),
        facts=serving_facts(read_log(folder / "logs" / "engine-0.log")),
    )


def faults(run: LoopRun, *, steps: int, warm: bool, validated: bool = True) -> list[str]:
    """Faults of a run of `steps` steps. warm: its policy had a warm start."""
    found = [run.ended] if run.ended else []
    if run.steps != steps:
        found.append(f"expected {steps} steps, found {run.steps} in {run.seconds:.0f} s")
    if not run.rewards or not all(map(math.isfinite, run.rewards)):
        found.append(f"expected a finite reward in each step, found {list(run.rewards)}")
    if not validated:
        return found
    rates = run.pass_rates
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates) or (warm and max(rates) == 0.0):
        expected = "above 0" if warm else "from 0 to 1"
        found.append(f"expected held-out pass rates {expected}, found {list(rates)}")
    return found


def _number(row: dict[str, Any], key: str) -> float:
    """A number of a record; NaN if it is missing or null, which is how NaN is written."""
    value = row.get(key)
    return math.nan if value is None else float(value)


def _rows(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.exists() else []

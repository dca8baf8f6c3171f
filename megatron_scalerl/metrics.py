"""One record per step: RUN/metrics.jsonl is the truth; TensorBoard and, if installed, W&B are sinks."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from megatron_scalerl.types import PassRate


class Sink(Protocol):
    """A place that scalars go to beside the JSONL."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record named scalars of one step."""

    def close(self) -> None:
        """Flush."""


class TensorBoardSink:
    """Event files in RUN/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record named scalars of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class WandbSink:
    """A W&B run of the recipe's name; used where wandb is installed and WANDB_MODE is not disabled."""

    def __init__(self, run_dir: Path, name: str) -> None:
        import wandb

        self._run = wandb.init(name=name, dir=str(run_dir), resume="allow", id=name)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record named scalars of one step."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Flush."""
        self._run.finish()


class Metrics:
    """Writes step records and validations, and rolls both back to a checkpoint at a restart."""

    def __init__(self, run_dir: str | Path, name: str) -> None:
        run_dir = Path(run_dir)
        self._steps = run_dir / "metrics.jsonl"
        self._validations = run_dir / "validation.jsonl"
        self._by_prompt = run_dir / "validation_by_prompt.jsonl"
        self._sinks: list[Sink] = []
        if importlib.util.find_spec("tensorboard"):
            self._sinks.append(TensorBoardSink(run_dir))
        if importlib.util.find_spec("wandb") and os.environ.get("WANDB_MODE") != "disabled":
            self._sinks.append(WandbSink(run_dir, name))

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one step's record; numbers also go to the sinks."""
        _append(self._steps, {"step": step, **record})
        self._to_sinks(step, record)

    def validation(self, result: PassRate, by_prompt: Sequence[float]) -> None:
        """Append one validation, and each held-out prompt's own pass rate for paired comparisons."""
        row = asdict(result)
        _append(self._by_prompt, {"step": result.step, "by_prompt": list(by_prompt)})
        _append(self._validations, row)
        self._to_sinks(result.step, {f"validation/{k}": v for k, v in row.items() if k != "step"})

    def has_validation(self, step: int) -> bool:
        """True if the validation of this step is recorded."""
        return self._validations.exists() and any(r["step"] == step for r in read_jsonl(self._validations))

    def roll_back(self, step: int) -> None:
        """Drop records of later steps: they are made again."""
        for path in (self._steps, self._validations, self._by_prompt):
            if path.exists():
                rows = [r for r in read_jsonl(path) if r["step"] <= step]
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf8")
                os.replace(temporary, path)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def _to_sinks(self, step: int, record: Mapping[str, Any]) -> None:
        scalars = {k: float(v) for k, v in record.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        for sink in self._sinks:
            sink.write(step, scalars)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Every whole line of a JSONL file; a torn last line is left out."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf8").split("\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            raise ValueError(f"{path} line {number}: expected a JSON object, found {line[:40]!r}") from None
    return rows


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with open(path, "a", encoding="utf8") as file:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        file.write(json.dumps(finite) + "\n")

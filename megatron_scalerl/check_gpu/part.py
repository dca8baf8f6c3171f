"""One part: its settings, its deadline, and its process, `python -m megatron_scalerl.check_gpu.part SETTING`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.programs import last_error, read_log
from megatron_scalerl.processes.child_process import end_with

Size = Literal["full", "quick", "toy"]
Layers = Literal["plain", "te"]
MARGIN_S = 8.0
"""Kept before a part's time limit to stop its processes and write its last finding."""
CHECK_S, TOY_CHECK_S = 45.0, 150.0
"""Time limit of one check of a running engine; of a rehearsal, where the engine computes on a shared CPU."""


@dataclass(frozen=True, kw_only=True)
class PartSetting:
    """How to run one part. Produced by the runner, passed to the part's process as JSON."""

    part: str
    """Name in `check_gpu.table`."""
    module: str
    """Dotted name of the module whose `run(setting, record)` is called."""
    on_gpu: bool
    """False in a rehearsal, which runs on the CPU."""
    size: Size
    """toy: seconds on two CPU cores; quick: the whole check within 5 minutes; full."""
    layers: Layers | None
    """The layers that the trainer has to build; None: its own choice."""
    folder: str
    """Scratch folder, shared by the parts of one call; parts reuse what earlier parts left there."""
    findings: str
    """JSON Lines file of this part's findings."""
    limit_s: float
    """Seconds until the part's process group is killed."""
    gpus: int
    """Visible GPUs; 0 in a rehearsal."""

    @property
    def scratch(self) -> Path:
        """`folder` as a path."""
        return Path(self.folder)

    @property
    def toy(self) -> bool:
        """True if everything has to be as small as the code path allows."""
        return self.size == "toy"

    @property
    def check_s(self) -> float:
        """Time limit of one check of a running engine, seconds."""
        return TOY_CHECK_S if self.toy else CHECK_S

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PartSetting":
        """Raises TypeError for unknown or missing fields."""
        return cls(**json.loads(text))


class Deadline:
    """Counts down from a part's time limit, less a margin."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + max(0.0, limit_s - MARGIN_S)

    def left(self, at_most: float = float("inf")) -> float:
        """Seconds left, at least 0.1 and at most `at_most`."""
        return max(0.1, min(at_most, self._end - time.monotonic()))

    def too_short(self, seconds: float, why: str) -> str:
        """Why something that takes `seconds` is not started; "" if there is time. why: the basis of the estimate."""
        if self.left() >= seconds:
            return ""
        return f"expected {seconds:.0f} s of the part's time ({why}), found {self.left():.0f} s left"


@contextlib.asynccontextmanager
async def limited(record: Recorder, check: str, seconds: float, log: Path | None = None) -> AsyncIterator[None]:
    """Fails `check` on an exception inside or after `seconds`, with the log's last error in the detail."""
    with record.guarded(check):
        try:
            async with asyncio.timeout(seconds):
                yield
        except Exception as error:
            what = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                what = f"expected an end within {seconds:.0f} s, found none"
            logged = "" if log is None else last_error(read_log(log))
            if log is not None and logged and logged not in what:
                what = f"{what}; {log.name}: {logged}"
            raise RuntimeError(what) from error


def _exit(*_: Any) -> None:
    """At the time limit: exit in order, so that process groups that the part started are stopped."""
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Run the part's module. Any exception ends the process with a traceback, which the runner reports."""
    signal.signal(signal.SIGTERM, _exit)
    begin = time.monotonic()
    setting = PartSetting.from_json(sys.argv[1])
    module = importlib.import_module(setting.module)
    left = setting.limit_s - (time.monotonic() - begin)  # importing torch and what depends on it takes seconds
    module.run(replace(setting, limit_s=left), Recorder(setting.part, Path(setting.findings)))


if __name__ == "__main__":
    end_with(main)

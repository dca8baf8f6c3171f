"""RUN/trace/steps_A_B.json: the spans of a window of optimizer steps, written when its last step has ended.

The window begins with the wait for the batch of its first step and ends with the weight update after its last one.
An attempt that ends within the window writes what it has, up to the step that it made last. A process that is killed
writes nothing: the file appears whole or not at all (`checkpoints.atomic_io`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.processes.chrome import trace
from megatron_scalerl.processes.spans import Recorder, Spans, install
from megatron_scalerl.recipe import Recipe

logger = logging.getLogger(__name__)

FOLDER = "trace"


class TraceFile:
    """A sink of step records (`controller.metrics`), whose steps turn the recorder of this process on and off."""

    def __init__(self, folder: Path, window: tuple[int, int], *, name: str, step: int) -> None:
        """window: first and last step. name: of the run. step: that the policy is at, before the window's last."""
        self._folder, self._name = folder, name
        self._first, self._last = max(window[0], step + 1), window[1]
        self._step = step
        self._recorder: Recorder | None = Recorder(active=step + 1 >= window[0])
        self._writer: threading.Thread | None = None
        install(self._recorder)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """A batch has ended, or a validation, which is ignored."""
        if self._recorder is None or "batches" not in scalars:
            return
        self._step = step
        self._recorder.active = self._first <= step + 1
        if step >= self._last:
            self._finish()

    def close(self) -> None:
        """The attempt ends: write what there is. Returns when the file is there."""
        self._finish()
        if self._writer is not None:
            self._writer.join()

    def _finish(self) -> None:
        """Record no more, and write in a thread: 200,000 spans take seconds, in which the engines need answers."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        install(None)
        if self._step < self._first:
            return
        spans = recorder.drain(cut=True)
        self._writer = threading.Thread(target=self._write, args=(spans, recorder), name="trace")
        self._writer.start()

    def _write(self, spans: Spans, recorder: Recorder) -> None:
        """Write the file. One that cannot be written is a line in the log, not the end of the run."""
        facts = {"run": self._name, "steps": [self._first, self._step], "dropped_rank_messages": recorder.refused}
        path = self._folder / f"steps_{self._first}_{self._step}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            write_durably(path, trace(spans, recorder.of_ranks, facts))
        except OSError as error:
            logger.warning("the trace is not written: %s", error)
        else:
            logger.info("trace of steps %d to %d: %s", self._first, self._step, path)


def trace_files(recipe: Recipe, run_dir: Path, *, step: int) -> tuple[TraceFile, ...]:
    """The sink of telemetry.trace_steps for an attempt from `step` on; none if the window is over or on the disk."""
    window, folder = recipe.telemetry.trace_steps, run_dir / FOLDER
    if window is None or step >= window[1] or (folder / f"steps_{window[0]}_{window[1]}.json").exists():
        return ()
    return (TraceFile(folder, window, name=recipe.name, step=step),)

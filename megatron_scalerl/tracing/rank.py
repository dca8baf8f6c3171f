"""Spans of a trainer rank: recorded while it works on a step of the window, sent with the answer to each command."""

from __future__ import annotations

import re

from megatron_scalerl.tracing.spans import Off, Open, Recorder, Spans, install, span

RANK = "rank"
"""Track of a rank's commands."""


class RankTrace:
    """Turns the recorder of this process on and off with the step that it works on."""

    def __init__(self, window: tuple[int, int] | None) -> None:
        """window: first and last step; None: nothing is ever recorded."""
        self._window = window
        self._recorder: Recorder | None = None

    def at(self, step: int | None) -> None:
        """The next command or batch is of this step; None: of the same as the last one."""
        if self._window is None or step is None:
            return
        if step > self._window[1]:
            self._recorder = None
        elif step >= self._window[0] and self._recorder is None:
            self._recorder = Recorder(active=True)
        install(None if step < self._window[0] else self._recorder)

    def command(self, command: object) -> Open | Off:
        """The span of a command, named like its class; recorded if its step or version is in the window."""
        step = getattr(command, "step", getattr(command, "version", None))
        self.at(step)
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(command).__name__).lower()
        return span(name, RANK) if step is None else span(name, RANK, step=step)

    def drain(self) -> Spans | None:
        """What was recorded since the last call; None outside of the window."""
        return None if self._recorder is None else self._recorder.drain()

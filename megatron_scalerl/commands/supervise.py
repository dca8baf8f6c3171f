"""`megatron-scalerl train --supervise`: runs the controller as a child process and starts it again when it fails.

The child is `megatron-scalerl train` without the option. It is not started again when it is done (exit code 0) or has
given up, of which RUN/end.json tells, after a user error at its first start (2) or twice in a row, where another
controller had the run at the first start (76), once a later attempt of its job has begun (`processes.signals`), where
Slurm has taken a host of the trainer out of the job (77), when SIGINT or SIGTERM stopped it (130, 143), and after
SIGUSR1 (75: it was to save and exit), also before it had handlers for them. Nor is it where a file of the run was
replaced, whose content is in FILE.kept (`checkpoints.atomic_io`). A child that was killed or failed resumes from its
newest checkpoint. The child ends when this process does, however that exits (`processes.parent_death`).
"""

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from megatron_scalerl.checkpoints.commit import latest
from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.processes.parent_death import tied_command
from megatron_scalerl.processes.signals import (
    HOSTS_LEFT_CODE,
    IN_USE_CODE,
    SAVE_SIGNAL,
    SAVED_CODE,
    SIGNALS,
    Takeover,
    exit_code_of,
    uncharged_from_now,
)

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
"""Delay before the first restart without a new checkpoint, which doubles with each (seconds)."""
LONGEST_DELAY_S = 300.0
"""Longest delay before a restart (seconds)."""
_HANDLED = (*SIGNALS, SAVE_SIGNAL)
_ENDED = (0, SAVED_CODE, *(128 + number for number in SIGNALS))
"""Exit codes of a run that is done or was asked to stop."""
_FINAL = (*_ENDED, HOSTS_LEFT_CODE)
"""Exit codes after which the run is not started again."""
_NOT_STARTED = (2, IN_USE_CODE)
"""Exit codes for a user error and for a run in use. They are final at the first start only: later a port that a dying
engine still has is a user error, too."""


def supervise(command: Sequence[str], run_dir: Path, *, restarts: int) -> int:
    """Run `command` until it ends for good; returns its exit code, 1 if another signal killed it.

    restarts: most restarts without a new checkpoint in between. The child gets SIGINT, SIGTERM and SIGUSR1, and then
    is not started again; if it fails after SIGUSR1, the result is 75, since the run can go on from a checkpoint.
    """
    stopped_by = []
    early = []
    codes = []
    variables = dict(os.environ)
    child: subprocess.Popen[bytes] | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        if child is not None:
            child.send_signal(number)
        else:
            early.append(number)

    with _handling(on_signal):
        failures = 0
        newest = latest(run_dir / "checkpoints")
        takeover = Takeover(run_dir)
        while True:
            charged = _size(run_dir / "ledger.jsonl")
            ended = read_jsonl(run_dir / "end.json")
            # In a new session: a terminal's SIGINT reaches the child once, from this process.
            child = subprocess.Popen(tied_command([*command]), start_new_session=True, env=variables)
            while early:  # received while the child was being started
                child.send_signal(early.pop(0))
            code = _exit_code(child.wait())
            child = None
            # The child has charged its devices up to now, so the next one charges from now on.
            if _size(run_dir / "ledger.jsonl") != charged:
                variables |= uncharged_from_now()
            not_started = code in _NOT_STARTED and failures == 0
            if SAVE_SIGNAL in stopped_by and code not in _ENDED and not not_started:
                logger.warning("the run ended with code %d after it was asked to save and exit", code)
                return SAVED_CODE
            ends = read_jsonl(run_dir / "end.json")
            gave_up = ends != ended and any(row.get("gave_up") for row in ends)
            how, code = _ending(code)
            if code in _FINAL or stopped_by or gave_up or not_started:
                return code
            failures += 1
            reached = latest(run_dir / "checkpoints")
            if reached != newest:
                newest = reached
                failures = 1
            codes.append(code)
            if vain := _in_vain(run_dir, codes, failures, restarts):
                logger.error("the run %s, %s: it is not started again", how, vain)
                return code
            delay = min(FIRST_DELAY_S * 2 ** (failures - 1), LONGEST_DELAY_S)
            logger.warning("the run %s: restart %d of at most %d in %g s", how, failures, restarts, delay)
            _pause(delay, stopped_by)
            if stopped_by:
                return exit_code_of(stopped_by[0])
            if takeover.happened:
                logger.error("a newer attempt of this job is running: exiting")
                return code


@contextlib.contextmanager
def _handling(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context in which `on_signal` handles the signals of _HANDLED."""
    before = {number: signal.signal(number, on_signal) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_vain(run_dir: Path, codes: Sequence[int], failures: int, restarts: int) -> str:
    """Why a further start cannot help after these exit codes, or is one too many; empty for neither."""
    for kept in run_dir.rglob("*.kept"):
        return f"and has left {kept}, which has to be renamed to {kept.stem}"
    if codes[-2:] == [2, 2]:
        return "for a mistake in its settings, twice in a row"
    if failures > restarts:
        return f"{failures} times without a new checkpoint"
    return ""


def _ending(code: int) -> tuple[str, int]:
    """(how the run ended, the exit code for it); `code` is negative for a run that a signal killed."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}", 1
    return f"failed with exit code {code}", code


def _size(file: Path) -> int:
    """Bytes of a file, -1 for a missing file."""
    if not file.exists():
        return -1
    return file.stat().st_size


def _exit_code(code: int) -> int:
    """The exit code of a child whose `Popen.wait` returned `code`.

    It is 130, 143 or 75 also if SIGINT, SIGTERM or SIGUSR1 ended the child before it had handlers for them.
    """
    if -code == SAVE_SIGNAL:
        return SAVED_CODE
    if -code in SIGNALS:
        # `Popen` gives minus the signal's number, a shell 128 plus it
        return 128 - code
    return code


def _pause(seconds: float, stopped_by: Sequence[int]) -> None:
    """Return after this time or at the first signal of _HANDLED, whose handler has run then.

    A signal that came before the call ends it, too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # none can come between the check and the wait
    try:
        if stopped_by:
            return
        received = signal.sigtimedwait(_HANDLED, seconds)
        if received is not None:
            # `sigtimedwait` takes the signal without its handler, which runs once the mask is restored
            signal.raise_signal(received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""`megatron-scalerl train --supervise`: runs the controller as a child process and restarts it after a failure.

The child is `megatron-scalerl train` without the option. A child that failed or was killed is started again and
resumes from the newest checkpoint. The child ends with this process (`processes.parent_death`). No restart follows
on:

exit code  end of the child
0          the run is done
2          user error at the first start, or twice in a row
75         SIGUSR1, which asks the child to save and exit; also before the child had a handler
76         another controller had the run at the first start
77         Slurm has taken a host of the trainer out of the job
130, 143   SIGINT or SIGTERM; also before the child had a handler
any        the run has given up (RUN/end.json)
any        a later attempt of the job has begun (`processes.signals`)
any        a file of the run was replaced, and the content is in FILE.kept (`checkpoints.atomic_io`)
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
"""Delay before the first restart without a new checkpoint; every further restart doubles the delay (seconds)."""
LONGEST_DELAY_S = 300.0
"""Longest delay before a restart (seconds)."""
_HANDLED_SIGNALS = (*SIGNALS, SAVE_SIGNAL)
_END_CODES = (0, SAVED_CODE, *(128 + number for number in SIGNALS))
"""Exit codes of a run that is done or was asked to stop."""
_FINAL_CODES = (*_END_CODES, HOSTS_LEFT_CODE)
"""Exit codes after which the run is not started again."""
_START_FAILURE_CODES = (2, IN_USE_CODE)
"""Exit codes for a user error and for a run in use. Both are final at the first start only: later, a port that a
dying engine still holds is a user error, too."""


def supervise(command: Sequence[str], run_dir: Path, *, restarts: int) -> int:
    """Run `command` and start the command again after failures; returns the exit code of the last child.

    restarts: most restarts without a new checkpoint in between. SIGINT, SIGTERM and SIGUSR1 are passed on to the
    child and end the restarts. The result is 1 if another signal killed the child, and 75 (resumable) after SIGUSR1.
    """
    stopped_by = []
    early_signals = []
    codes = []
    variables = dict(os.environ)
    child: subprocess.Popen[bytes] | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        if child is not None:
            child.send_signal(number)
        else:
            early_signals.append(number)

    with _handling(on_signal):
        failures = 0
        newest = latest(run_dir / "checkpoints")
        takeover = Takeover(run_dir)
        while True:
            ledger_size = _size(run_dir / "ledger.jsonl")
            old_ends = read_jsonl(run_dir / "end.json")
            # In a new session: a terminal's SIGINT reaches the child once, from this process.
            child = subprocess.Popen(tied_command([*command]), start_new_session=True, env=variables)
            while early_signals:  # signals that this process received before `child` was set
                child.send_signal(early_signals.pop(0))
            code = _exit_code(child.wait())
            child = None
            # The child has charged devices up to now to the ledger, so the next child charges from now on.
            if _size(run_dir / "ledger.jsonl") != ledger_size:
                variables |= uncharged_from_now()
            not_started = code in _START_FAILURE_CODES and failures == 0
            if SAVE_SIGNAL in stopped_by and code not in _END_CODES and not not_started:
                logger.warning("the run ended with code %d after it was asked to save and exit", code)
                return SAVED_CODE
            ends = read_jsonl(run_dir / "end.json")
            gave_up = ends != old_ends and any(row.get("gave_up") for row in ends)
            end_text, code = _ending(code)
            if code in _FINAL_CODES or stopped_by or gave_up or not_started:
                return code
            failures += 1
            checkpoint = latest(run_dir / "checkpoints")
            if checkpoint != newest:
                newest = checkpoint
                failures = 1
            codes.append(code)
            if objection := _restart_objection(run_dir, codes, failures, restarts):
                logger.error("the run %s and is not started again: %s", end_text, objection)
                return code
            delay = min(FIRST_DELAY_S * 2 ** (failures - 1), LONGEST_DELAY_S)
            logger.warning("the run %s: restart %d of at most %d in %g s", end_text, failures, restarts, delay)
            _pause(delay, stopped_by)
            if stopped_by:
                return exit_code_of(stopped_by[0])
            if takeover.happened:
                logger.error("a newer attempt of this job is running: exiting")
                return code


@contextlib.contextmanager
def _handling(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context in which `on_signal` handles SIGINT, SIGTERM and SIGUSR1; the earlier handlers are restored at the
    end."""
    old_handlers = {number: signal.signal(number, on_signal) for number in _HANDLED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _restart_objection(run_dir: Path, codes: Sequence[int], failures: int, restarts: int) -> str:
    """The reason why the run is not started again, or "" if a restart may help.

    codes: exit codes of the run so far. failures: failures since the newest checkpoint.
    """
    for kept_file in run_dir.rglob("*.kept"):
        return f"a file was replaced during the run; rename {kept_file} to {kept_file.stem} first"
    if codes[-2:] == [2, 2]:
        return "the settings were refused twice in a row"
    if failures > restarts:
        return f"{failures} failures without a new checkpoint"
    return ""


def _ending(code: int) -> tuple[str, int]:
    """(text that says how the run ended, exit code of this process). code: minus a signal's number if a signal killed
    the run."""
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

    A child that SIGINT, SIGTERM or SIGUSR1 ended before the child had handlers has the exit code 130, 143 or 75, too.
    """
    if -code == SAVE_SIGNAL:
        return SAVED_CODE
    if -code in SIGNALS:
        # `Popen` gives minus the signal's number, a shell 128 plus the number
        return 128 - code
    return code


def _pause(seconds: float, stopped_by: Sequence[int]) -> None:
    """Wait for `seconds`, or until a signal of _HANDLED_SIGNALS has come and the handler has run.

    stopped_by: signals that the handler has received so far; if there is a signal, the call returns at once.
    """
    # the signals are blocked, so that no signal can come between the check and the wait
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    try:
        if stopped_by:
            return
        received = signal.sigtimedwait(_HANDLED_SIGNALS, seconds)
        if received is not None:
            # `sigtimedwait` takes the signal without the handler, which runs once the mask is restored
            signal.raise_signal(received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

"""A process with a log that only its owner can read, in a group of its own that ends as a whole."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_scalerl.processes.child_process import open_log, signal_group
from megatron_scalerl.processes.parent_death import tied_command

Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def own_group(
    argv: Sequence[str], log: Path, env: Mapping[str, str], *, errors_too: bool = True
) -> Iterator[Process]:
    """Start `argv`; when the block is left its whole group is killed. It dies with this process too.

    env: added to this process's environment. log: replaced; gets standard output, and with `errors_too` standard
    error, which otherwise stays this process's.
    """
    log.unlink(missing_ok=True)
    with open_log(log) as output:
        process = subprocess.Popen(
            tied_command(list(argv)),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if errors_too else None,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        signal_group(process.pid)
        process.wait()


def ended_within(process: Process, seconds: float) -> int | None:
    """Its exit code, negative for a signal; None where it still runs after `seconds`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=max(0.0, seconds))
    return None

"""Maps failures of a run: user errors (exit code 2), failures of the running run (exit code 1)."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_scalerl.processes.child_process import open_log
from megatron_scalerl.recipe.file import RecipeError


class RunFailed(RuntimeError):
    """A run failed after its start, not by a user error."""


@contextmanager
def log_failures(log: str | Path) -> Iterator[None]:
    """Context of a run whose inputs are checked and whose folder exists.

    Inside, a ValueError means an invalid answer of a peer, a damaged file or a bug, so every exception other than
    RuntimeError and OSError becomes RunFailed, which names its type. A RecipeError remains a user error. Of an
    exception group the first exception is raised. The traceback of every failure is appended to `log`, and a note
    on the exception names that file.
    """
    try:
        yield
    except Exception as error:
        first = _first_of(error)
        if isinstance(first, RecipeError):
            raise first from None
        with open_log(Path(log)) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{traceback.format_exc()}\n".encode())
        expected = isinstance(first, RuntimeError | OSError)
        failure = first if expected else RunFailed(f"{type(first).__name__}: {first}")
        failure.add_note(f"traceback in {log}")
        if failure is error:
            raise
        raise failure from error


def _first_of(error: Exception) -> Exception:
    return _first_of(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error

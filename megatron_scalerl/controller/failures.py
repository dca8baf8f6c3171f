"""Maps failures of a run: user errors (exit code 2), failures of the running run (exit code 1)."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_scalerl.processes.child_process import open_log
from megatron_scalerl.processes.logs import log_to_file
from megatron_scalerl.recipe.file import RecipeError

logger = logging.getLogger(__name__)


class RunFailed(RuntimeError):
    """A run failed after its start, not by a user error."""


@contextmanager
def log_failures(log: str | Path) -> Iterator[None]:
    """Context of a run whose inputs are checked and whose folder exists.

    Inside, a ValueError means an invalid answer of a peer, a damaged file or a bug, so every exception other than
    RuntimeError and OSError becomes RunFailed, which names its type. A RecipeError remains a user error. Of an
    exception group the first exception is raised. What the controller logs is appended to `log`, as is the traceback
    of every failure, and a note on the exception names that file.
    """
    with open_log(Path(log)) as file:
        text = io.TextIOWrapper(file, "utf8", "backslashreplace")  # a path may hold bytes that are not UTF-8
        with log_to_file(text, "controller"), _failures(log):
            yield


@contextmanager
def _failures(log: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        first = _first_of(error)
        if isinstance(first, RecipeError):
            raise first from None
        logger.exception("the run failed")
        expected = isinstance(first, RuntimeError | OSError)
        failure = first if expected else RunFailed(f"{type(first).__name__}: {first}")
        failure.add_note(f"traceback in {log}")
        if failure is error:
            raise
        raise failure from error


def _first_of(error: Exception) -> Exception:
    return _first_of(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error

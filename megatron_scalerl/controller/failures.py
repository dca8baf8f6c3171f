"""Whose failure it is: a mistake in what was given (exit code 2), or a run that failed under way (exit code 1)."""

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
    """A run failed after it had begun, through no mistake in what was given."""


@contextmanager
def under_way(log: str | Path) -> Iterator[None]:
    """Around everything that happens once a run's inputs have been checked and its folder is there.

    From then on a ValueError is a peer's broken answer, a damaged file or a bug: whatever is neither RuntimeError
    nor OSError becomes RunFailed, which names its type. What is a mistake after all is raised as RecipeError. Of a
    group of failures the first one counts. What the controller logs is appended to `log`, as is the traceback of
    every failure, which a note on the error points to.
    """
    with open_log(Path(log)) as file, log_to_file(io.TextIOWrapper(file, "utf8"), "controller"), _failures(log):
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
        known = isinstance(first, RuntimeError | OSError)
        failure = first if known else RunFailed(f"{type(first).__name__}: {first}")
        failure.add_note(f"traceback in {log}")
        if failure is error:
            raise
        raise failure from error


def _first_of(error: Exception) -> Exception:
    return _first_of(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error

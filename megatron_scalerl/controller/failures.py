"""Whose failure it is: a mistake in what was given (exit code 2), or a run that failed under way (exit code 1)."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_scalerl.processes.child_process import open_log
from megatron_scalerl.recipe.file import RecipeError


class RunFailed(RuntimeError):
    """A run failed after it had begun, through no mistake in what was given."""


@contextmanager
def under_way(log: str | Path) -> Iterator[None]:
    """Around everything that happens once a run's inputs have been checked and its folder is there.

    From then on a ValueError is a peer's broken answer, a damaged file or a bug: whatever is neither RuntimeError
    nor OSError becomes RunFailed, which names its type. What is a mistake after all is raised as RecipeError. Of a
    group of failures the first one counts. The traceback of every failure is appended to `log`, and a note on the
    error says so.
    """
    try:
        yield
    except Exception as error:
        first = _first_of(error)
        if isinstance(first, RecipeError):
            raise first from None
        with open_log(Path(log)) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{traceback.format_exc()}\n".encode())
        known = isinstance(first, RuntimeError | OSError)
        failure = first if known else RunFailed(f"{type(first).__name__}: {first}")
        failure.add_note(f"traceback in {log}")
        if failure is error:
            raise
        raise failure from error


def _first_of(error: Exception) -> Exception:
    return _first_of(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error

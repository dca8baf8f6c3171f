"""Logging of every process of a run: one format, one level, one log file per process.

Trainer ranks and engines write to stderr, which is the file RUN/logs/NAME.log. The controller writes to
RUN/logs/controller.log, and writes warnings to the terminal as well. Only the owner can read the log files. The
run's secret is never logged. This module imports nothing outside the standard library.
"""

import logging
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

LEVEL_VARIABLE = "MSRL_LOG_LEVEL"
"""Environment variable with the level, inherited by every process of a run: debug, info (default), warning or
error."""
NAME_VARIABLE = "MSRL_PROCESS_NAME"
"""Environment variable with the name of a child process, for example trainer-3."""
FORMAT = "%(asctime)s %(levelname)-7s %(process_name)s %(name)s: %(message)s"
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
PACKAGE = __name__.partition(".")[0]


def log_level() -> int:
    """Level of the package's loggers. Raises ValueError if MSRL_LOG_LEVEL is not the name of a level."""
    name = os.environ.get(LEVEL_VARIABLE, "info").lower()
    if name not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE}: expected one of {', '.join(LEVELS)}, found {name!r}")
    return LEVELS[name]


def log_to_stderr(*logger_names: str) -> None:
    """Log to stderr for as long as this child process runs.

    logger_names: names of loggers of other packages whose handlers get this package's format, too.
    """
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler())
    for logger in (root, *map(logging.getLogger, logger_names)):
        for handler in logger.handlers:
            handler.setFormatter(_formatter(os.environ.get(NAME_VARIABLE, "main")))
    logging.getLogger(PACKAGE).setLevel(log_level())


class _Stream(logging.StreamHandler[TextIO]):
    """A handler that silently drops a record that cannot be written, for example on a full disk.

    `logging.StreamHandler` would print 30 lines about each dropped record, and so hide why the run ended.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def log_to_file(file: TextIO) -> Iterator[None]:
    """Write the controller's log to an open file during the block."""
    with _handler(_Stream(file), log_level()):
        yield


@contextmanager
def log_to_terminal() -> Iterator[None]:
    """Write the controller's log to stderr during the block, from level MSRL_LOG_LEVEL, else from warning on.

    Records with tracebacks are left out: the log file has the tracebacks.
    """
    handler = _Stream(sys.stderr)
    handler.addFilter(lambda record: not record.exc_info)
    level = logging.WARNING
    if LEVEL_VARIABLE in os.environ:
        level = log_level()
    with _handler(handler, level):
        yield


@contextmanager
def _handler(handler: logging.Handler, level: int) -> Iterator[None]:
    handler.setFormatter(_formatter("controller"))
    handler.setLevel(level)
    package = logging.getLogger(PACKAGE)
    previous_level = package.level
    package.setLevel(log_level())
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        package.setLevel(previous_level)


def printable(text: str) -> str:
    """`text` with control characters escaped (`\\x1b`): the text cannot send commands to a terminal."""
    # Unicode's categories of control, format, surrogate, private and unassigned characters begin with C.
    controls = {c for c in text if unicodedata.category(c).startswith("C")} - {"\n", "\t"}
    return text.translate({ord(c): ascii(c)[1:-1] for c in controls})


def listed(names: Iterable[str], limit: int = 20) -> str:
    """At most `limit` names, without repetitions, and the number of names left out: "a, b and 3 more"."""
    names = list(dict.fromkeys(names))
    text = ", ".join(names[:limit])
    if len(names) <= limit:
        return text
    return f"{text} and {len(names) - limit} more"


def size(count: float) -> str:
    """A number of bytes as text with a unit: "1.92 GiB"."""
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << scale:
            return f"{count / (1 << scale):,.2f} {unit}"
    return f"{count:,.0f} bytes"


class _Formatter(logging.Formatter):
    """A formatter that indents all lines of a record except the first.

    Records may quote text that the policy wrote, such as completions. Indented, no quoted line looks like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")


def _formatter(process_name: str) -> logging.Formatter:
    return _Formatter(FORMAT, defaults={"process_name": process_name})

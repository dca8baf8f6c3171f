"""The end of a process that formed torch's process groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def end_with(main: Callable[[], object]) -> NoReturn:
    """Run a program and end this process with its exit code, without Python's cleanup, its output written.

    `main` returns an exit code or None, or raises: SystemExit as usual, any other exception is printed and is exit
    code 1. Functions of `atexit` are not called. For a process that forms groups of gloo: their threads go on after
    `distributed.parallel.shutdown_parallel`, as Megatron refers to the groups. While Python ends, they abort the
    process once in a while ("terminate called without an active exception": 1 of 40 processes of a single rank on two
    busy cores, torch 2.13), and the destructor of a group may wait for a lost peer.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    status = code if isinstance(code, int) else int(code is not None)
    for stream, last in ((sys.stdout, ""), (sys.stderr, f"{code}\n" if isinstance(code, str) else "")):
        try:
            stream.write(last)
            stream.flush()
        except OSError:  # its reader has gone
            status = status or 1
        except (ValueError, AttributeError):  # the program closed it, or it was closed at the start, and is None
            pass
    os._exit(status & 0xFF)

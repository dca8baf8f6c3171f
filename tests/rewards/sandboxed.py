"""Programs in a sandbox with small limits, for the tests of the verifier `code`."""

import ctypes
import os
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_scalerl.rewards.code import verify_code
from megatron_scalerl.rewards.limits import Limits
from megatron_scalerl.rewards.sandbox import Sandbox

LIMITS = Limits(cpu_s=5.0, memory_mb=256, file_mb=1)


def output(program, given="", *, limits=LIMITS, limit=1 << 16):
    """The Result of one run."""
    with Sandbox(limits) as sandbox:
        (result,) = sandbox.run(program, [given], [limit])
    return result


def prints(program, **options):
    """What a program prints; it has to end well."""
    result = output(program, **options)
    assert result.code == 0, result
    return result.output.decode().strip()


def answer(program):
    """An answer with this program."""
    return f"So:\n```python\n{program}\n```\n"


def verdict(program, tests, *, limits=LIMITS):
    """What the verifier says of an answer with this program."""
    return verify_code(answer(program), tests, {}, limits=limits)


@contextmanager
def own_sandboxes():
    """Gives a function that returns the sandboxes' processes below this one: others of this machine have theirs.

    An orphan's parent becomes this process meanwhile, so that none hides behind a parent that was killed.
    """
    _adopt_orphans(True)
    try:
        yield _sandboxes
    finally:
        _adopt_orphans(False)
        for pid in _children().get(os.getpid(), ()):
            if _command(pid) == b"":  # a zombie
                os.waitpid(pid, os.WNOHANG)


def _adopt_orphans(adopt):
    if ctypes.CDLL(None, use_errno=True).prctl(36, int(adopt), 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _sandboxes():
    children, below, found = _children(), [os.getpid()], set()
    while below:
        below += children.pop(pid := below.pop(), ())
        if b"sandbox" in _command(pid) or b"program.py" in _command(pid):
            found.add(pid)
    return found - {os.getpid()}


def _children():
    """Process -> its children."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
    return children


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended
        return b""

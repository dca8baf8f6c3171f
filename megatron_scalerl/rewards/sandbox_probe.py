"""Tests whether this host can isolate programs: a program in a sandbox tries actions that must fail."""

import json
import os
import sys
import time
from typing import Any

from megatron_scalerl.rewards.limits import Limits
from megatron_scalerl.rewards.sandbox import Result, Sandbox, SandboxError
from megatron_scalerl.rewards.sandbox_init import THREADS
from megatron_scalerl.rewards.sandbox_seccomp import MACHINE, is_supported

TIMEOUT_S = 60.0
MEMORY_MB = 4096
"""Memory limit of the probe (MiB), large enough that only the limit of threads bounds the number of threads."""
FEWEST_THREADS = 8
"""Smallest number of threads that a program must be able to start."""
_HEAD = "rewards.verifier code: this host cannot isolate programs"
_PROBE = f"""
import json, os, socket, threading
def fails(call):
    try:
        call()
    except (OSError, RuntimeError):
        return True
    return False
def fork():
    if os.fork() == 0:
        os._exit(0)
forked = not fails(fork)
threading.stack_size(1 << 16)
threads, stop = 0, threading.Event()
for _ in range({2 * THREADS}):
    if fails(threading.Thread(target=stop.wait, daemon=True).start):
        break
    threads += 1
stop.set()
print(json.dumps({{
    "a new process": forked,
    "a socket": not fails(socket.socket),
    "files of the host": sorted(set(os.listdir("/")) - {{"dev", "etc", "lib", "lib64", "tmp", "usr"}}),
    "a folder that can be written": not fails(lambda: os.mkdir("/folder")),
    "an environment": sorted(set(os.environ) - {{"PYTHONHASHSEED", "LC_CTYPE"}}),
    "the rights of root": os.getuid() == 0,
    "threads": threads,
}}))
"""


def check_sandbox(limits: Limits) -> None:
    """Check that this host can isolate a program, and run a program within `limits`; else raises ValueError."""
    if not is_supported() or sys.platform != "linux":
        raise ValueError(f"{_HEAD}: it is {sys.platform} on {os.uname().machine}, not linux on {MACHINE}")
    leaks = json.loads(_run(_PROBE, Limits(cpu_s=TIMEOUT_S, memory_mb=MEMORY_MB, file_mb=0)).output)
    threads = leaks.pop("threads")
    # Before Linux 5.14 the limit RLIMIT_NPROC counts all of the user's processes on the host, not in the sandbox.
    if not FEWEST_THREADS <= threads < THREADS:
        raise ValueError(
            f"{_HEAD}: a program starts {threads} threads; Linux since 5.14 allows {FEWEST_THREADS} to {THREADS - 1}"
        )
    # The interpreter's top folder has to be visible, so the folder is no leak.
    prefix = sys.base_prefix.split("/")[1]
    leaks["files of the host"] = [name for name in leaks["files of the host"] if name != prefix]
    for leak, value in leaks.items():
        if value:
            raise ValueError(f"{_HEAD}: a program in a sandbox has {leak}{_value_text(value)}")
    if _run("pass", limits).code:
        raise ValueError(f"rewards.memory_mb: {limits.memory_mb} MiB are too few to start Python in a sandbox")


def _value_text(value: Any) -> str:
    return f": {', '.join(value)}" if isinstance(value, list) else ""


def _run(program: str, limits: Limits) -> Result:
    """Run a program in a new sandbox. Raises ValueError if sandbox or interpreter do not start."""
    try:
        with Sandbox(limits, deadline=time.monotonic() + TIMEOUT_S) as sandbox:
            results = list(sandbox.run(program, [""], [1 << 16]))
    except SandboxError as error:
        raise ValueError(f"{_HEAD}: {error}") from None
    if not results or (results[0].code and program is _PROBE):
        end = f"with exit status {results[0].code}" if results else "without a result"
        raise ValueError(f"{_HEAD}: {os.path.realpath(sys.executable)} inside a sandbox ended {end}")
    return results[0]

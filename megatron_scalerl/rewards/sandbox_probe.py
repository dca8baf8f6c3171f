"""Whether this host can isolate programs: found out by a program in a real sandbox that tries what must fail."""

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
"""Of the probe: enough for its threads, so that only their own limit can stop them."""
FEWEST_THREADS = 8
"""Threads that a program must be able to start."""
_HEAD = "rewards.verifier code: expected a host that can isolate programs"
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
    """Try a sandbox, and a program within `limits`. Raises ValueError, in one line, if this host cannot."""
    if not is_supported() or sys.platform != "linux":
        raise ValueError(f"{_HEAD}, Linux on {MACHINE}, found {sys.platform} on {os.uname().machine}")
    found = json.loads(_run(_PROBE, Limits(cpu_s=TIMEOUT_S, memory_mb=MEMORY_MB, file_mb=0)).output)
    threads = found.pop("threads")
    if not FEWEST_THREADS <= threads < THREADS:
        bounds = f"{FEWEST_THREADS} to {THREADS} threads of a program (Linux 5.14)"
        raise ValueError(f"{_HEAD}, {bounds}, found {threads}")
    prefix = sys.base_prefix.split("/")[1]
    found["files of the host"] = [name for name in found["files of the host"] if name != prefix]
    for what, value in found.items():
        if value:
            raise ValueError(f"{_HEAD}, found {what} inside{_named(value)}")
    if _run("pass", limits).code:
        raise ValueError(
            f"rewards.memory_mb: expected enough for an interpreter (verifier code), found {limits.memory_mb}"
        )


def _named(value: Any) -> str:
    return f": {', '.join(value)}" if isinstance(value, list) else ""


def _run(program: str, limits: Limits) -> Result:
    """Run a program once. Raises ValueError if there is no sandbox, or no interpreter in it."""
    try:
        with Sandbox(limits, deadline=time.monotonic() + TIMEOUT_S) as sandbox:
            results = list(sandbox.run(program, [""], [1 << 16]))
    except SandboxError as error:
        raise ValueError(f"{_HEAD}; {error}") from None
    if not results or (results[0].code and program is _PROBE):
        found = f"exit status {results[0].code}" if results else "its end"
        raise ValueError(f"{_HEAD}, and {os.path.realpath(sys.executable)} to run inside, found {found}")
    return results[0]

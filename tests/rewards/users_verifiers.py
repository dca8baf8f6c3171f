"""A user's module of verifiers, as the pool's processes import it. The answer selects what most of them do."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time

import numpy

from megatron_scalerl.processes.worker import FRAME, REPLY
from megatron_scalerl.rewards.limits import VerifierUnavailable

calls = 0
kept = []


def same(answer_text, reference, extra):
    return answer_text == reference


def faulty(answer_text, reference, extra):
    """Does what the first word of the answer says; otherwise compares."""
    word, _, rest = answer_text.partition(" ")
    if word in FAULTS:
        FAULTS[word](rest)
    return answer_text == reference


def _sleep(rest):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(10**6)


def _spin(rest):
    while True:
        pass


def _raise(rest):
    raise RuntimeError("no such answer")


def _fifo(path):
    hold = open(path, "w")  # noqa: SIM115 (left open on purpose)
    child = subprocess.Popen(["sleep", "1000000"], pass_fds=[hold.fileno()])
    hold.write(f"{os.getpid()} {child.pid}\n")
    hold.flush()
    time.sleep(10**6)


def _escape(folder):
    """Leaves a child in its own session with every pipe of this process, then hangs.

    The child's id becomes the name of a folder.
    """
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(10**6)
    os.mkdir(f"{folder}/{child}")
    time.sleep(10**6)


FAULTS = {
    "sleep": _sleep,
    "spin": _spin,
    "exit": lambda rest: os._exit(0),
    "segfault": lambda rest: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda rest: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda rest: os.abort(),
    "quit": lambda rest: sys.exit(0),
    "raise": _raise,
    "fifo": _fifo,
    "escape": _escape,
}


def mortal(answer_text, reference, extra):
    """Kills its process in its first `extra["deaths"]` runs; every run creates a folder in extra["folder"]."""
    run = 0
    while True:
        run += 1
        try:
            os.mkdir(f"{extra['folder']}/{answer_text} {run}")
            break
        except FileExistsError:
            pass
    if run <= extra["deaths"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer_text.split()[0] == reference


def held(answer_text, reference, extra):
    """Writes its process id to one fifo and continues when the other one is closed."""
    if answer_text.startswith("held"):
        with open(extra["says"], "w") as says:
            says.write(f"{os.getpid()}\n")
        with open(extra["waits"]) as waits:
            waits.read()
        return True
    return answer_text == reference


def hungry(answer_text, reference, extra):
    """Uses resources as `extra` says: `mb` of memory at once, in small pieces or leaked; `cpu_s` of processor."""
    if extra.get("kept_mb"):
        kept.append(bytearray(extra["kept_mb"] * 2**20))
    if extra.get("mb"):
        bytearray(extra["mb"] * 2**20)
    if extra.get("pieces_mb"):
        [bytearray(2**20) for _ in range(extra["pieces_mb"])]
    end = time.process_time() + extra.get("cpu_s", 0.0)
    while time.process_time() < end:
        pass
    return answer_text == reference


def limits(answer_text, reference, extra):
    """True if the limits of this process are `extra["limits"]`."""
    return all(resource.getrlimit(getattr(resource, name)) == tuple(value) for name, value in extra["limits"].items())


def writes(answer_text, reference, extra):
    with open(extra["path"], "wb") as file:
        file.write(bytes(extra["bytes"]))
    return True


def sees(answer_text, reference, extra):
    """True if an environment variable of that name reaches the verifier with that value."""
    return os.environ.get(answer_text) == extra["value"]


def noisy(answer_text, reference, extra):
    print('{"value": true}')
    os.write(1, b"printed\n")
    sys.stdin.read()
    return answer_text == reference


def forging(answer_text, reference, extra):
    """Writes the reply to another check into everything that is open."""
    for descriptor in range(256):
        with contextlib.suppress(OSError):
            os.write(descriptor, FRAME.pack(1, REPLY, 15, 0) + b'{"value": true}')
    return False


def graded(answer_text, reference, extra):
    return {
        "none": None,
        "nan": float("nan"),
        "text": "right",
        "number": "2",
        "bytes": b"3",
        "array": numpy.str_("1"),
    }.get(answer_text, extra.get("value"))


def asked(answer_text, reference, extra):
    return extra["prompt"] == answer_text


def numpy_bool(answer_text, reference, extra):
    return numpy.bool_(answer_text == reference)


def counting(answer_text, reference, extra):
    """The number of its calls in this process."""
    global calls
    calls += 1
    if answer_text == "raise":
        raise RuntimeError(f"call {calls}")
    return float(calls)


def modules(answer_text, reference, extra):
    return not {"torch", "transformers", "vllm", "megatron", "pydantic"} & set(sys.modules)


def two_arguments(answer_text, reference):
    return True


not_a_function = 3


class StatusError(Exception):
    """As HTTP libraries raise it."""

    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.status_code = status


def judged(answer_text, reference, extra):
    """Does what the first word says as if it asked a judge; otherwise the first word is compared."""
    word, _, rest = answer_text.partition(" ")
    if word == "refused":
        raise ConnectionRefusedError(111, "Connection refused")
    if word == "status":
        raise StatusError(int(rest.split()[0]))
    if word == "unavailable":
        raise VerifierUnavailable("the judge is down")
    if word == "hang":
        time.sleep(10**6)
    return word == reference

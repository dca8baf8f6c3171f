"""A verifier process: `python -m megatron_scalerl.rewards.worker`, started and killed by the pool.

It imports the verifier, reports that it is ready, and then checks answers: several numbered checks arrive as one
frame (8 bytes of length, then a pickle). Every check produces two JSON lines, one when it begins and one with its
result, so that the pool can time each check and knows which one is running. It imports neither torch nor
transformers.

Only the verifier itself may raise or exceed its limits (limits.py). Answers are data: they come from a pickle that
the pool wrote and are passed on as str. Replies are JSON with the number of the check.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from megatron_scalerl.processes.parent_death import die_with_parent
from megatron_scalerl.rewards.limits import (
    MIB,
    Limits,
    TimeLimitExceeded,
    VerifierUnavailable,
    address_space,
    limit_process,
    limited_check,
)

FRAME = struct.Struct("!Q")
RETIRE_GROWTH = 2.0
"""A worker that grew by this many times `memory_mb` since it loaded its verifier is replaced: checks may leak."""
Verifier = Callable[[str, str, dict[str, Any]], Any]


def load_verifier(spec: str, limits: Limits) -> Verifier:
    """The function for `math`, `code` or `module:function`. Raises ValueError, in one line, if it cannot be used."""
    if spec == "math":
        from megatron_scalerl.rewards import math

        math.warm_up()
        return math.verify_math
    if spec == "code":
        from megatron_scalerl.rewards import code, sandbox_probe

        sandbox_probe.check_sandbox(limits)
        return functools.partial(code.verify_code, limits=limits)
    module_name, separator, name = spec.partition(":")
    head = f"rewards.verifier {spec!r}"
    if not (module_name and separator and name):
        raise ValueError(f"{head}: expected 'math', 'code' or 'module:function', found none of them")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises on import
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{head}: expected a module that imports, found {reason}") from None
    verifier = getattr(module, name, None)
    if not callable(verifier):
        found = "nothing of that name" if verifier is None else f"a {type(verifier).__name__}"
        raise ValueError(f"{head}: expected a function {name} in {module_name}, found {found}")
    _check_signature(head, name, verifier)
    return verifier


def _check_signature(head: str, name: str, verifier: Verifier) -> None:
    try:
        signature = inspect.signature(verifier)
    except ValueError:  # written in C without a signature
        return
    try:
        signature.bind("", "", {})
    except TypeError:
        found = f"{name}{signature}"
        raise ValueError(f"{head}: expected a function (answer_text, reference, extra), found {found}") from None


def run_check(verifier: Verifier, check: bytes, limits: Limits) -> dict[str, Any]:
    """Run one check within its limits: {"value": a bool or a finite float}.

    Or {"memory": True} or {"timeout": True} if that limit was exceeded, {"unavailable": why} if the check could not
    be made, or {"error": a traceback}.
    """
    try:
        with limited_check(limits):
            value = verifier(*pickle.loads(check))
        value = value.item() if hasattr(value, "item") else value  # numpy scalars
        if not isinstance(value, bool):
            value = float(value)
            if value - value != 0.0:
                raise ValueError(f"expected a bool or a finite float, found {value}")
    except MemoryError:
        return {"memory": True}
    except TimeLimitExceeded:
        return {"timeout": True}
    except VerifierUnavailable as problem:
        return {"unavailable": str(problem)}
    except Exception:  # the user's verifier on model output; the pool counts it
        return {"error": traceback.format_exc()[-4000:]}
    return {"value": value}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Report whether the verifier loaded, then serve requests until the pool closes the pipe."""
    setup = pickle.loads(_read_frame(requests) or b"")
    sys.path.extend(entry for entry in setup["sys_path"] if entry not in sys.path)
    limits: Limits = setup["limits"]
    try:
        verifier = load_verifier(setup["verifier"], limits)
    except ValueError as error:
        _reply(replies, {"error": str(error)})
        return
    if setup["verifier"] != "code":  # its sandbox limits the programs, and needs room for what they read
        limit_process(limits)
    loaded = address_space()
    _reply(replies, {"ready": True})
    while (frame := _read_frame(requests)) is not None:
        for serial, check in pickle.loads(frame):
            _reply(replies, {"began": serial})
            outcome = run_check(verifier, check, limits)
            retire = _has_grown(loaded, limits)
            _reply(replies, {"serial": serial, "retire": retire, **outcome})
            if retire:
                return


def _has_grown(loaded: int, limits: Limits) -> bool:
    return limits.memory_mb is not None and address_space() - loaded > RETIRE_GROWTH * limits.memory_mb * MIB


def _read_frame(requests: BinaryIO) -> bytes | None:
    head = requests.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    (size,) = FRAME.unpack(head)
    body = requests.read(size)
    return body if len(body) == size else None


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def main() -> None:
    """Move the pool's pipes away from stdin and stdout, which the verifier may use for its own input and output."""
    die_with_parent(int(sys.argv[1]))
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        serve(requests, replies)


if __name__ == "__main__":
    main()

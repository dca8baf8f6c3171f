"""A verifier process: `python -m megatron_scalerl.rewards.worker`, started and killed by the pool.

The process imports the verifier, reports that it is ready, and then checks answers; the pool sends each check as a
pickle (`processes.worker`). The process imports neither torch nor transformers.

A verifier may raise or exceed limits (`limits`) without harm to the pool. An answer is never executed here: the pool
wrote the pickle, in which the answer is a str. Replies do not use stdout and stderr, to which a verifier may print.
"""

import errno
import functools
import inspect
import pickle
import resource
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from megatron_scalerl.processes.imports import imported
from megatron_scalerl.processes.worker import Answer, serve
from megatron_scalerl.record import record
from megatron_scalerl.rewards.limits import (
    MIB,
    Limits,
    TimeLimitExceeded,
    VerifierUnavailable,
    address_space,
    limit_process,
    limited_check,
)

RETIRE_GROWTH = 2.0
"""Growth of a worker's address space, as a multiple of `memory_mb`, at which a new worker replaces the worker.

Checks may leak memory."""
MOST_FAILURES = 16
"""Number of failed checks of a coroutine function in a row after which the process is replaced.

The checks may fail because an earlier check damaged the state of the process.
"""
MOST_REWARD = 1e6
"""Largest absolute value of a reward. With larger rewards the variance in a batch might overflow."""
CONNECTION_ERRORS = frozenset(
    [
        "ClientConnectionError",
        "ClientPayloadError",
        "ChunkedEncodingError",
        "IncompleteRead",
        "NetworkError",
        "RemoteProtocolError",
        "SSLEOFError",
        "TimeoutException",
    ]
)
"""Names of exceptions of aiohttp, httpx, requests and http.client for a connection that was refused or broke."""
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
Verifier = Callable[[str, str, dict[str, Any]], Any]


@record
class Setup:
    """Settings of all checks of a pool."""

    verifier: str
    """The recipe's `rewards.verifier`."""
    limits: Limits
    timeout_s: float
    """Time limit of a check by a coroutine function (s)."""


@record
class Outcome:
    """The outcome of a check: a value, or the reason why there is no value."""

    value: bool | float | None = None
    """The verifier's result, a bool or a finite float."""
    limit: str = ""
    """`memory` or `timeout`: the check exceeded this limit; `crash`: the process died otherwise; else empty."""
    unavailable: str = ""
    """The reason why the check could not be made, such as a judge that does not answer; else empty."""
    error: str = ""
    """The traceback of a verifier that raised or returned no reward; else empty."""
    unusable: str = ""
    """The reason why no answer to the prompt may be rewarded; empty for a usable prompt."""
    returned: str = ""
    """The fault of a returned value that is neither a reward nor None; empty for a reward or None."""
    waited: bool = False
    """Whether the verifier waited for something, such as a judge, before giving the reward."""

    @property
    def raised(self) -> bool:
        """Whether the verifier raised or returned no reward, without a sign of an outage or an exceeded limit."""
        return self.error != "" and not self.unavailable and not self.limit

    @property
    def failed(self) -> bool:
        """Whether the verifier raised or died, or the verifier's service was unavailable."""
        return self.raised or self.unavailable != "" or self.limit == "crash"

    @property
    def reason(self) -> str:
        """The reason why the verifier failed, or the traceback."""
        return self.unavailable or self.error


def load_verifier(spec: str, limits: Limits) -> Verifier:
    """The verifier `math`, `code` or `module:function` as a function. Raises ValueError, in one line, if unusable."""
    if spec == "math":
        from megatron_scalerl.rewards import math

        math.warm_up()
        return math.verify_math
    if spec == "code":
        from megatron_scalerl.rewards import code, sandbox_probe

        sandbox_probe.check_sandbox(limits)
        return functools.partial(code.verify_code, limits=limits)
    return _custom(spec)


def check_verifier(spec: str) -> None:
    """Raises ValueError, in one line, for a verifier that cannot be loaded. Does not try a sandbox for `code`."""
    if spec not in ("math", "code"):
        _custom(spec)


def _custom(spec: str) -> Verifier:
    head = f"rewards.verifier {spec!r}"
    verifier = imported(head, spec, "'math', 'code' or 'module:function'")
    if not callable(verifier):
        raise ValueError(f"{head}: it is a {type(verifier).__name__}; it has to be a function")
    check_signature(head, verifier, "answer_text", "reference", "extra")
    return verifier


def check_signature(head: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raises ValueError, in one line that begins with `head`, if a function does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(function, "__name__", "it")
        raise ValueError(f"{head}: it has to take ({', '.join(arguments)}); it is {name}{signature}") from None


def is_judge(verifier: Verifier) -> bool:
    """Whether a verifier is a coroutine function, or an object with a coroutine function as `__call__`."""
    return inspect.iscoroutinefunction(verifier) or inspect.iscoroutinefunction(type(verifier).__call__)


class NoReward(ValueError):
    """A verifier returned an object that is neither a reward nor None; the message says which object."""


def run_check(verifier: Verifier, check: bytes, limits: Limits) -> Outcome:
    """Check an answer within the limits; for the answer None, whether any answer to the prompt may be rewarded.

    check: pickle of (answer, reference, extra), or of (None, verifier, question, reference, columns).
    """
    waits = _waits()
    try:
        with limited_check(limits):
            answer, *row = pickle.loads(check)
            if answer is None:
                unusable = _text(problem_of(limits, *row))
                return Outcome(value=not unusable, unusable=unusable)
            value = reward_of(verifier(answer, *row))
    except MemoryError:
        return Outcome(limit="memory")
    except TimeLimitExceeded:
        return Outcome(limit="timeout")
    except VerifierUnavailable as problem:
        return Outcome(unavailable=_text(str(problem)))
    except Exception as error:  # a user's verifier may raise anything; the pool counts the failure
        if is_unavailable(error):
            return Outcome(unavailable=_text(f"{type(error).__name__}: {error}"[:1000]))
        return Outcome(error=_text(traceback.format_exc()[-4000:]), returned=_returned(error))
    return Outcome(value=value, waited=_waits() > waits)


def _waits() -> int:
    """Number of times that this process has waited for another process, a device or the network."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _returned(error: BaseException) -> str:
    """The message of the error if the error is a NoReward, else empty."""
    return _text(str(error)) if isinstance(error, NoReward) else ""


def reward_of(value: Any) -> bool | float:
    """The reward in a verifier's returned value: the value itself, or the `score` of a mapping.

    Raises ValueError for None, and NoReward for a value that is no reward.
    """
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if inspect.isawaitable(value):
        raise NoReward("it returned a coroutine; declare the function and all decorators `async def`")
    if value is None:
        raise ValueError("it returned None; return False for a wrong answer")
    try:
        if hasattr(value, "item"):  # numpy's scalars have this method
            value = value.item()
        if isinstance(value, bool):
            return value
        # `float` would accept a string such as "1"; a string has no `__float__`, and so is refused.
        number = value.__float__()
        if abs(number) <= MOST_REWARD:
            return float(number)
    except (AttributeError, ArithmeticError, TypeError, ValueError):
        pass
    raise NoReward(
        f"it returned {repr(value)[:100]}; it has to return True, False, a number up to {MOST_REWARD:g}, or a dict "
        "with such a value under the key score"
    )


async def run_judge(verifier: Verifier, check: bytes, timeout_s: float) -> Outcome:
    """Run one check of a coroutine function. Without a reward the service that the function asks counts as failed."""
    import asyncio

    limit = asyncio.timeout(timeout_s)
    begin = time.process_time()
    passes: list[None] = []
    # the event loop calls `append` only when the function waits for something, so `passes` shows a wait
    asyncio.get_running_loop().call_soon(passes.append, None)
    try:
        async with limit:
            value = reward_of(await verifier(*pickle.loads(check)))
        return Outcome(value=value, waited=bool(passes))
    except (Exception, asyncio.CancelledError) as error:
        lines = traceback.format_exception_only(error)  # works even if the error's __str__ raises
        reason = next(line for line in lines if not line.startswith(" ")).strip()[:1000]
        trace = traceback.format_exc()[-4000:]
        if limit.expired():
            computed = time.process_time() - begin
            reason = f"no answer within {timeout_s:g} s, in which the verifier process computed for {computed:.1f} s"
            trace = ""
        elif is_unavailable(error):
            trace = ""
        return Outcome(unavailable=_text(reason), error=_text(trace), returned=_returned(error))


def problem_of(limits: Limits, verifier: str, question: str, reference: str, columns: dict[str, Any]) -> str:
    """The reason why no answer to a prompt may be rewarded; empty for a usable prompt.

    Raises as `code_checks.problem_of`.
    """
    from megatron_scalerl.rewards import code_checks, math

    if verifier == "math":
        return math.check_references([reference])[0]
    return code_checks.problem_of(question, reference, columns, limits)


def is_unavailable(error: BaseException) -> bool:
    """Whether an error means that the service which a verifier asks (a judge over HTTP) failed.

    An HTTP status of the exception, of the exception's response or of a cause decides first: 408, 429 and 5xx are
    failures of the service. Without a status, failures of the service are a refused, broken or impossible connection,
    a host name that does not resolve, and a timeout. For all further exceptions the answer may be the cause.
    """
    links = list(_links(error, set()))
    for link in links:
        status = _status(link)
        if status is not None:
            return status in (408, 429) or status >= 500
    kinds = {kind for link in links for kind in type(link).__mro__}
    is_connection_error = not CONNECTION_ERRORS.isdisjoint(kind.__name__ for kind in kinds)
    unreachable = any(isinstance(link, OSError) and link.errno in UNREACHABLE for link in links)
    return (
        is_connection_error or unreachable or not kinds.isdisjoint((ConnectionError, TimeoutError, socket.gaierror))
    )


def _links(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """An exception, all exceptions that caused the exception, and all members of an exception group."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    for part in getattr(error, "exceptions", ()):
        yield from _links(part, seen)
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    yield from _links(cause, seen)


def _status(error: BaseException) -> int | None:
    """The HTTP status in an exception or in the exception's response; None without a status."""
    for name in ("status_code", "status"):
        for place in (error, getattr(error, "response", None)):
            try:
                status = getattr(place, name, None)
            except (AttributeError, RuntimeError, ValueError):  # a property may raise if there is no value
                continue
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def _text(text: str) -> str:
    """The text with lone surrogates escaped, since JSON cannot hold a lone surrogate that an error may quote."""
    return text.encode(errors="backslashreplace").decode()


def load(setup_json: bytes) -> Callable[[bytes, bytes], Any] | str:
    """The function that runs checks, or the reason (str) why the verifier cannot be used."""
    setup = msgspec.json.decode(setup_json, type=Setup)
    limits = setup.limits
    try:
        verifier = load_verifier(setup.verifier, limits)
    except ValueError as problem:
        return _text(str(problem))
    if is_judge(verifier):
        failures = 0

        async def judge_answer(head: bytes, check: bytes) -> Answer:
            nonlocal failures
            outcome = await run_judge(verifier, check, setup.timeout_s)
            failures = failures + 1 if outcome.unavailable else 0
            return Answer(head=outcome, last=failures >= MOST_FAILURES)

        return judge_answer
    if setup.verifier != "code":
        # Not for `code`: the sandbox limits the programs, and the sandbox's own processes need room for the input.
        limit_process(limits)
    loaded = address_space()

    def answer(head: bytes, check: bytes) -> Answer:
        outcome = run_check(verifier, check, limits)
        has_grown = limits.memory_mb is not None and address_space() - loaded > RETIRE_GROWTH * limits.memory_mb * MIB
        return Answer(head=outcome, last=has_grown)

    return answer


if __name__ == "__main__":
    serve(load)

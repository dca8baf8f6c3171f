"""An environment process: `python -m megatron_scalerl.environments.worker`, started and killed by the pool.

The process imports the user's class, reports the class's declarations, and then serves many episodes at once. An
episode has an object of the class, and never runs two calls at once. The heads of the frames (`processes.worker`):

    setup      Setup; the reply's body is Declared
    request    Request: reset with a row, step with a response, run with a row and an agent. A request with none of
               the three closes the episode, and gets no reply
    reply      Reply

Methods that are coroutines run on the event loop; `reset` and `step` are cancelled after the time limit, `run` when
the episode is closed. All further methods run in threads, which nothing can stop: after the time limit the pool kills
the process. An environment's output goes to the log of the process, not into the protocol.
"""

import asyncio
import contextlib
import inspect
import json
import os
import resource
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Literal

import msgspec

from megatron_scalerl.environments.response import Agent, Response
from megatron_scalerl.processes.imports import imported
from megatron_scalerl.processes.worker import (
    Answer,
    ignore_signals,
    pool_socket,
    receive_setup,
    send,
    serve_concurrently,
)
from megatron_scalerl.record import record
from megatron_scalerl.rewards.limits import MIB, lower
from megatron_scalerl.rewards.worker import check_signature, is_unavailable

TURN_BYTES = 2**20
"""Largest size of a call's result, as JSON in UTF-8 (bytes)."""
ERROR_CHARS = 4000
"""Largest number of characters of a traceback in a reply; a longer traceback loses the beginning."""
Failure = Literal["", "raised", "unavailable", "invalid", "oversized", "hung"]


Setup = tuple[str, int | None, float]
"""(environment.name, environment.memory_mb, time limit of a coroutine in s): settings of an environment process."""
Declared = tuple[list[dict[str, Any]], Literal["wrong", "lost"], bool]
"""(tools, repeated_failure, whether the class has `run`): declarations of the user's class.

The tools are JSON schemas of functions. repeated_failure: whether an episode counts as `wrong` or is `lost` if a call
fails again when tried again.
"""


@record
class Request:
    """A request to call a method of an episode's environment, or without row and response, to close the episode."""

    episode: int
    row: dict[str, Any] | None = None
    """The row, for a call of reset or run."""
    response: Response | None = None
    """The policy's response, for a call of step."""
    agent: Agent | None = None
    """Address and key by which the agent asks the policy, for a call of run."""


@record
class Reply:
    """The result of a call, or the reason why the call failed."""

    turn: msgspec.Raw
    """`pool.Turn` as JSON, without checks of the values."""
    failure: Failure
    """The reason of the call's failure; empty for a valid result."""
    error: str
    """The end of the traceback; empty without a failure."""


def encoded(value: Any, *, finite: bool = False) -> bytes:
    """A value as JSON in UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes a question mark.

    finite: raise ValueError for NaN and infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=not finite, default=_builtin_value)
    return text.encode(errors="replace")


def _builtin_value(value: Any) -> Any:
    # numpy's scalars have the method `item`.
    if hasattr(value, "item"):
        return value.item()
    return msgspec.to_builtins(value)


async def _reply(request: Request, kind: Any, place: list[Any], timeout_s: float) -> Reply:
    """Call a method of the user's class and return the reply; an exception also becomes a reply.

    place: list for the episode's object, empty before the first call.
    """

    arguments = [value for value in (request.response, request.row, request.agent) if value is not None]
    name = "reset"
    if request.response is not None:
        name = "step"
    elif request.agent is not None:
        name = "run"

    def call() -> Any:
        if request.row is not None:
            place.append(kind())
        return getattr(place[0], name)(*arguments)

    asynchronous = inspect.iscoroutinefunction(getattr(kind, name))
    # The duration of a run depends on the policy, so the pool decides when to end a run.
    limit = asyncio.timeout(timeout_s if asynchronous and name != "run" else None)
    turn = b"null"
    error = ""
    failure: Failure = "raised"
    try:
        async with limit:
            result = await (call() if asynchronous else asyncio.to_thread(next, _generated(call)))
        failure = "invalid"
        turn = encoded(_turn(result, name), finite=True)
        failure = ""
    except BaseException as problem:
        # BaseException, so that SystemExit does not end the process, which has further episodes.
        error = traceback.format_exc()[-ERROR_CHARS:].encode(errors="replace").decode()
        if limit.expired() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
            failure = "hung"
        elif failure == "raised" and is_unavailable(problem):
            failure = "unavailable"
    if error:
        # The error also goes to the log; writing fails if the class has closed stderr.
        with contextlib.suppress(OSError, ValueError):
            os.write(2, f"{name} failed ({failure}):\n{error}".encode())
    if len(turn) > TURN_BYTES:
        error = f"{name} returned {len(turn)} bytes of JSON; at most {TURN_BYTES} bytes are allowed"
        failure = "oversized"
        turn = b"null"
    return Reply(turn=msgspec.Raw(turn), failure=failure, error=error)


def _generated(call: Callable[[], Any]) -> Iterator[Any]:
    """Yields the result of a call. Inside a generator a StopIteration of the user's code becomes a RuntimeError.

    The caller needs this, since a future cannot hold a StopIteration.
    """
    yield call()


def _turn(result: Any, name: str) -> dict[str, Any]:
    """The fields of `pool.Turn`, made from the result of the method `name`; messages become a list."""
    if name == "reset":
        result = (result, None, False)
    elif name == "run":
        result = ([], result, True)
    if isinstance(result, tuple) and len(result) == 5:
        raise ValueError(f"{name} returned five values, as in Gymnasium; return three: messages, reward, done")
    messages, reward, done = result
    metrics: Mapping[str, Any] = {}
    if isinstance(reward, tuple):
        reward, metrics = reward
    if isinstance(messages, str):
        messages = {"role": "user", "content": messages}
    if isinstance(messages, Mapping):
        messages = [messages]
    return {
        "messages": [dict(message) for message in messages],
        "reward": reward,
        "done": done,
        "metrics": {name: float(value) for name, value in metrics.items()},
    }


def _kind(head: str, name: str) -> Any:
    """The class for environment.name, MODULE:CLASS or verifiers:NAME. Raises ValueError if there is no such class."""
    library, _, environment = name.partition(":")
    if library != "verifiers":
        return imported(head, name, "'module:Class'")
    # The import is here because the module `verifiers` is slow to import.
    from megatron_scalerl.environments.verifiers import agent_class

    try:
        return agent_class(environment)
    except (ModuleNotFoundError, ValueError) as problem:
        raise ValueError(f"{head}: {problem}") from None


def load(name: str) -> tuple[type, Declared]:
    """The user's class and its declarations. Raises ValueError, in one line, for a class that cannot be used."""
    head = f"environment.name {name!r}"
    kind = _kind(head, name)
    if not isinstance(kind, type):
        raise ValueError(f"{head}: it is a {type(kind).__name__}; it has to be a class")
    check_signature(head, kind)
    methods: dict[str, tuple[str, ...]] = {"reset": ("row",), "step": ("response",)}
    agent = hasattr(kind, "run")
    if agent:
        methods = {"run": ("row", "agent")}
    for call, arguments in methods.items():
        method = getattr(kind, call, None)
        if not callable(method):
            raise ValueError(f"{head}: the class has no method {call}")
        if inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method):
            raise ValueError(f"{head}: {call} is a generator, as it has a yield; return the result instead")
        check_signature(f"{head}: {call}", method, "self", *arguments)
    declared = (getattr(kind, "tools", ()), getattr(kind, "repeated_failure", "lost"), agent)
    try:
        return kind, msgspec.json.decode(encoded(declared, finite=True), type=Declared)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{head}: tools has to be a list of JSON objects, and repeated_failure 'wrong' or 'lost' ({error})"
        ) from None


def _answers(kind: type, timeout_s: float) -> Callable[[bytes, bytes], Coroutine[Any, Any, Answer | None]]:
    """The function that answers the requests for episodes of a class. timeout_s: time limit of a coroutine."""
    stoppable = inspect.iscoroutinefunction(getattr(kind, "run", None))
    episodes: dict[int, list[Any]] = {}
    calls: dict[int, asyncio.Task[Any] | None] = {}
    """Number of an episode -> the task of the latest call."""

    async def answer(head: bytes, _: bytes) -> Answer | None:
        # Not msgspec.json: a row may hold NaN, which msgspec's decoder refuses.
        request = msgspec.convert(json.loads(head), Request)
        if request.row is None and request.response is None:
            # The episode may be unknown, if closed before or closed without a call.
            episodes.pop(request.episode, None)
            call = calls.pop(request.episode, None)
            if call is not None and stoppable:
                call.cancel()
            return None
        calls[request.episode] = asyncio.current_task()
        place = episodes.setdefault(request.episode, [])
        return Answer(head=await _reply(request, kind, place, timeout_s))

    return answer


def main() -> None:
    """Serve episodes until the controller ends this process."""
    # SIGINT and SIGTERM are ignored: the controller gets the same signals, and may still finish episodes.
    ignore_signals()
    with pool_socket() as connection:
        request, setup_json = receive_setup(connection)
        name, memory_mb, timeout_s = msgspec.json.decode(setup_json, type=Setup)
        lower(resource.RLIMIT_CORE, 0)
        if memory_mb is not None:
            lower(resource.RLIMIT_AS, memory_mb * MIB)
        with asyncio.Runner() as runner:
            try:
                kind, declared = load(name)
                if name.startswith("verifiers:"):
                    runner.run(kind.start_server())  # type: ignore[attr-defined]
            except (ValueError, ConnectionError) as problem:
                line = str(problem).splitlines()[0].encode(errors="replace").decode()
                send(connection, request, Answer(head=line, last=True))
                return
            send(connection, request, Answer(head="", body=msgspec.json.encode(declared)))
            runner.run(serve_concurrently(connection, _answers(kind, timeout_s)))


if __name__ == "__main__":
    main()

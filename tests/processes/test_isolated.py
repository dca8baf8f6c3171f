"""A function in a separate process: its events arrive in order, and every way to end is reported as one event."""

import os
import select
import signal

import pytest

from megatron_scalerl.processes import isolated
from megatron_scalerl.processes.isolated import events


def succeeds(count, send):
    for number in range(count):
        send({"number": number})


@pytest.fixture
def until_over():
    """Holds up a child that calls it until the test is over."""
    reader, writer = os.pipe()

    def wait():
        os.close(writer)
        select.select([reader], [], [])

    yield wait
    os.close(reader)
    os.close(writer)


def ends(how, until_over, send):
    send({"begun": how})
    if how == "value":
        raise ValueError("--x: expected y\nmore")
    if how == "key":
        raise KeyError("z")
    if how == "exit":
        raise SystemExit(0)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "gone":
        os._exit(7)
    if how == "orphan" and os.fork():  # its child still holds the pipe
        os._exit(7)
    until_over()


def received(work, *arguments, start="fork", silence_timeout_s=240.0):
    return list(events(work, *arguments, start=start, silence_timeout_s=silence_timeout_s))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_events_arrive_in_order(start):
    assert received(succeeds, 3, start=start) == [{"number": n} for n in range(3)]


@pytest.mark.parametrize(
    ("how", "last"),
    [
        ("value", {"failed": "--x: expected y", "user_error": True}),
        ("key", {"failed": "KeyError: 'z'"}),
        ("exit", {"failed": "SystemExit: 0"}),
        ("killed", {"failed": "its process ended with SIGKILL"}),
        ("gone", {"failed": "its process ended with exit code 7"}),
        ("orphan", {"failed": "its process ended with exit code 7"}),
    ],
)
def test_every_end_is_one_event(how, last, until_over):
    assert received(ends, how, until_over) == [{"begun": how}, last]


def test_a_silent_process_is_killed(until_over, monkeypatch):
    """The limit binds the silence after its first event: that one may take a while."""
    next_event, at_least = isolated._next_event, iter([240.0, 0.0])
    monkeypatch.setattr(
        isolated,
        "_next_event",
        lambda receiver, child, limit_s: next_event(receiver, child, max(limit_s, next(at_least))),
    )
    assert received(ends, "silent", until_over, silence_timeout_s=0.5) == [
        {"begun": "silent"},
        {"failed": "no event within 0.5 s"},
    ]


def test_closing_the_iterator_kills_the_process(until_over):
    listening = events(ends, "silent", until_over, start="fork", silence_timeout_s=240.0)
    next(listening)
    listening.close()

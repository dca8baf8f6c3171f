"""A function in a separate process: its events arrive in order, and every way to end is reported as one event."""

import os
import signal
import time

import pytest

from megatron_scalerl.processes.isolated import events


def succeeds(count, send):
    for number in range(count):
        send({"number": number})


def ends(how, send):
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
    time.sleep(5)


def received(work, *arguments, start="fork", silence_timeout_s=20.0):
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
def test_every_end_is_one_event(how, last):
    began = time.monotonic()
    assert received(ends, how) == [{"begun": how}, last]
    assert time.monotonic() - began < 4


def test_a_silent_process_is_killed():
    began = time.monotonic()
    assert received(ends, "silent", silence_timeout_s=0.5) == [
        {"begun": "silent"},
        {"failed": "no event within 0.5 s"},
    ]
    assert time.monotonic() - began < 4


def test_closing_the_iterator_kills_the_process():
    listening = events(ends, "silent", start="fork", silence_timeout_s=20.0)
    next(listening)
    began = time.monotonic()
    listening.close()
    assert time.monotonic() - began < 4

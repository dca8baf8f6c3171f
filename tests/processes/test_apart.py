"""Work in a process of its own: what it says arrives, and whatever becomes of it is one event."""

import os
import signal
import time

import pytest

from megatron_scalerl.processes.isolated import events


def well(count, say):
    for number in range(count):
        say({"number": number})


def ends(how, say):
    say({"begun": how})
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


def heard(work, *arguments, start="fork", patience_s=20.0):
    return list(events(work, *arguments, start=start, patience_s=patience_s))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_what_it_says_arrives_in_order(start):
    assert heard(well, 3, start=start) == [{"number": n} for n in range(3)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("value", {"failed": "--x: expected y", "users": True}),
        ("key", {"failed": "KeyError: 'z'"}),
        ("exit", {"failed": "SystemExit: 0"}),
        ("killed", {"failed": "its process ended with SIGKILL"}),
        ("gone", {"failed": "its process ended with exit code 7"}),
        ("orphan", {"failed": "its process ended with exit code 7"}),
    ],
)
def test_every_end_is_one_event(how, said):
    began = time.monotonic()
    assert heard(ends, how) == [{"begun": how}, said]
    assert time.monotonic() - began < 4


def test_silence_has_an_end():
    began = time.monotonic()
    assert heard(ends, "silent", patience_s=0.5) == [{"begun": "silent"}, {"failed": "nothing heard for 0.5 s"}]
    assert time.monotonic() - began < 4


def test_a_caller_that_stops_listening_ends_it():
    listening = events(ends, "silent", start="fork", patience_s=20.0)
    next(listening)
    began = time.monotonic()
    listening.close()
    assert time.monotonic() - began < 4

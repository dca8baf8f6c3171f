"""A user's module of environments, as the pool's processes import it. The text of a response selects what they do."""

import asyncio
import contextlib
import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

from megatron_scalerl.processes.worker import FRAME, REPLY

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


class Counting:
    """Adds the numbers that it gets; done at 100 and more. Other words are faults."""

    def reset(self, row):
        self.total = row.get("start", 0)
        self.row = row
        if row.get("fault"):
            fault(row["fault"], self)
        return f"begin at {self.total}"

    def step(self, response):
        if not response.text.isdigit():
            fault(response.text, self)
            return f"after {response.text.partition(' ')[0]}", None, False
        self.total += int(response.text)
        return f"now {self.total}", float(self.total), self.total >= 100


SPOILED = []


class Spoiling(Counting):
    """One episode changes what all in its process have, the first time that it is asked to."""

    def reset(self, row):
        if SPOILED:
            raise OSError("Too many open files")
        return super().reset(row)

    def step(self, response):
        if response.text == "spoil":
            SPOILED.append(True)
            raise OSError("Too many open files")
        return super().step(response)


class CountingAsync(Counting):
    tools = (TOOL,)
    repeated_failure = "wrong"

    async def reset(self, row):
        await asyncio.sleep(0.001)
        return super().reset(row)

    async def step(self, response):
        await asyncio.sleep(0.001)
        if response.text == "sleep":
            await asyncio.sleep(10**6)
        return super().step(response)


class Meeting(Counting):
    """A step returns once as many steps are in progress as the row says: 50 episodes at once, or none returns."""

    arrived = 0
    condition = threading.Condition()

    def step(self, response):
        with Meeting.condition:
            Meeting.arrived += 1
            Meeting.condition.notify_all()
            Meeting.condition.wait_for(lambda: Meeting.arrived >= self.row["parties"], 200)
        return super().step(response)


class Messages:
    """Returns what Python makes of the response's text, or of the row's."""

    def reset(self, row):
        return eval(row["first"])

    def step(self, response):
        return eval(response.text)


class Echo:
    """Returns the row and the response as it got them."""

    def reset(self, row):
        self.row = row
        return repr(sorted(row.items()))

    def step(self, response):
        return repr(response), None, False


class Runs:
    """An agent that returns what Python makes of the row's text, or hangs."""

    def run(self, row, agent):
        if row["text"] == "hang":
            time.sleep(10**6)
        return eval(row["text"])


class RunsAsync:
    async def run(self, row, agent):
        word, _, path = row["text"].partition(" ")
        if word == "hang":
            if path:
                Path(path).touch()
            await asyncio.sleep(10**6)
        return eval(row["text"])


class Yields(Counting):
    async def reset(self, row):
        yield "x"


class Gymnasium(Counting):
    def step(self, response):
        return "x", 0.0, False, False, {}


class DoneNumber(Counting):
    def step(self, response):
        return "x", 0.0, 1


class NoAgent:
    def run(self, row):
        return True


class NoStep:
    def reset(self, row):
        return "x"


class NoRow(NoStep):
    def reset(self):
        return "x"

    def step(self, response):
        return "x", None, False


class Configured(Counting):
    def __init__(self, size):
        self.size = size


class BadTools(Counting):
    tools = ("look",)


class BadRepeated(Counting):
    repeated_failure = "right"


def a_function(row):
    return "x"


def fault(text, environment):
    word, _, rest = text.partition(" ")
    FAULTS[word](rest)


def _raise(_):
    raise RuntimeError("no such \udc80 action")


def _refused(_):
    raise ConnectionRefusedError("nobody listens")


def _once(path):
    """Ends the process the first time."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    os._exit(3)


def _child(path):
    """Leaves a child that has every descriptor of this process, and ends it."""
    child = os.fork()
    if not child:
        time.sleep(10**6)
    Path(path).write_text(str(child))
    os._exit(4)


def _forge(data):
    """Writes to each socket of this process, more than a buffer holds; one of them is the pool's."""
    for _ in range(40):
        for descriptor in range(3, 1000):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, data)
        time.sleep(0.01)
    time.sleep(10**6)


def framed(number, head):
    return FRAME.pack(number, REPLY, len(head), 0) + head


STEP = 5
"""Number of the step that writes them."""
FORGED = {
    "garbage": b"x" * 100,
    "unknown": framed(123456789, b"{}"),
    "huge": FRAME.pack(STEP, REPLY, 2**22, 0),
    "deep": framed(STEP, b'{"turn":' + b"[" * 50_000 + b"]" * 50_000 + b',"failure":"","error":""}'),
    "reason": framed(STEP, b'{"turn":null,"failure":"own","error":""}'),
}

FAULTS = {
    "raise": _raise,
    "refused": _refused,
    "once": _once,
    "exit": lambda _: os._exit(0),
    "quit": lambda _: sys.exit("enough"),
    "stop": lambda _: next(itertools.chain()),
    "hang": lambda _: time.sleep(10**6),
    "print": lambda _: [sys.stdout.write("x" * 2**20 + "\n") for _ in range(4)],
    "shell": lambda _: subprocess.run(["sh", "-c", "echo from a child; echo to stderr >&2"], check=True),
    "child": _child,
    **{word: lambda _, data=data: _forge(data) for word, data in FORGED.items()},
}

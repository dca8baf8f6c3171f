"""A user's module of judges, as the pool's processes import it: coroutine functions that ask over HTTP."""

import asyncio
import os
import sys
import threading
import time

import aiohttp

session = None


async def judged(answer_text, reference, extra):
    """The score that the judge at `extra["url"]` gives in its JSON."""
    global session
    session = session or aiohttp.ClientSession(raise_for_status=True)
    async with session.post(extra["url"], json={"answer": answer_text, "reference": reference}) as answer:
        return (await answer.json())["score"]


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


async def faulty(answer_text, reference, extra):
    """Does what the first word of the answer says; otherwise waits a little and compares."""
    word, _, _ = answer_text.partition(" ")
    await asyncio.sleep(0.05)
    if word == "exit":
        os._exit(3)
    if word == "leave":
        sys.exit("usage")
    if word == "unprintable":
        raise Unprintable
    if word == "uncompilable":
        compile("(", "module.py", "exec")
    if word == "block":
        time.sleep(10**6)
    if word == "spin":
        while True:
            pass
    if word == "cancel":
        raise asyncio.CancelledError
    if word == "hang":
        await asyncio.sleep(10**6)
    return word == reference


async def keyed(answer_text, reference, extra):
    """Whether the variable is in the environment of the process."""
    return os.environ.get(answer_text) == reference


forty = threading.Barrier(40)


async def threaded(answer_text, reference, extra):
    """As a client that is no coroutine; none returns before forty are called."""
    await asyncio.to_thread(forty.wait)
    return True


spoiled = False


async def spoiling(answer_text, reference, extra):
    """After the answer "spoil" no other is judged in this process."""
    global spoiled
    if answer_text.startswith("held"):
        return await held(answer_text, reference, extra)
    if spoiled:
        raise RuntimeError("spoiled")
    spoiled = answer_text == "spoil"
    return answer_text == reference


async def held(answer_text, reference, extra):
    """The answer "held N" is judged once the file is there."""
    while answer_text.startswith("held") and not os.path.exists(extra["file"]):
        await asyncio.sleep(0.01)
    return True


class Judge:
    """Two answers are compared once both are asked about."""

    def __init__(self):
        self._both = asyncio.Barrier(2)

    async def __call__(self, answer_text, reference, extra):
        await self._both.wait()
        return answer_text == reference


judge = Judge()


def decorated(answer_text, reference, extra):
    """A coroutine, as a decorator that is no `async def` makes it."""
    return faulty(answer_text, reference, extra)

"""A stream of events to each open page: that there is something new, and what is damaged. Nothing is queued.

`Follower` looks for something new in one task, whose reading is done in threads, so that the event loop does not wait
for a disk. The task ends with its block, the streams of events with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from megatron_scalerl.page.loopback import security_headers
from megatron_scalerl.processes.logs import printable

logger = logging.getLogger(__name__)
T = TypeVar("T")
POLL_S = 1.0
"""Seconds between two looks at the files."""

KEEP_ALIVE_S = 15.0
"""Seconds after which a stream without news sends a comment, so that a closed one is noticed."""


class News:
    """Sets an `asyncio.Event` of each open stream, after which the browser asks for the data."""

    def __init__(self) -> None:
        self.failure = ""
        """One line about a damaged file; empty without one."""
        self._streams: set[asyncio.Event] = set()

    @property
    def heard(self) -> bool:
        """Whether a stream is open."""
        return bool(self._streams)

    def tell(self) -> None:
        """Every open page is to ask for the data."""
        for news in self._streams:
            news.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """A stream of events: `change` when there is something new, `failed` with the line when a file is damaged."""
        response = web.StreamResponse(headers=security_headers() | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        news, said = asyncio.Event(), ""
        self._streams.add(news)
        news.set()  # what came between the page and this request
        try:
            while True:
                try:
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    await response.write(b": still here\n\n")
                    continue
                news.clear()
                if self.failure != said:
                    said = self.failure
                    await response.write(b"event: failed\ndata: " + msgspec.json.encode(said) + b"\n\n")
                await response.write(b"event: change\ndata: 1\n\n")
        except ConnectionResetError:
            return response
        finally:
            self._streams.discard(news)


class Follower(ABC):
    """Follows files and tells the open pages. All reading is done under one lock, in threads."""

    followed: str
    """What the page follows, in its messages."""

    def __init__(self) -> None:
        self.news = News()
        self._lock = asyncio.Lock()

    @abstractmethod
    def _update(self) -> bool:
        """Read what is new; True if there is something."""

    @abstractmethod
    async def _work(self) -> bool:
        """Compute one thing that is missing; False if nothing is."""

    @abstractmethod
    def _damage(self) -> str:
        """What cannot be read."""

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow within the block. The page says what is damaged in the files, and draws the rest."""
        await self._locked(self._update)
        self._say(self._damage())
        if self.news.failure:
            logger.warning("%s", self.news.failure)
        task = asyncio.create_task(self._follow(), name=f"follow {self.followed}")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                changed = await self._locked(self._update)
                busy = await self._work()
            except Exception as error:
                self._say(f"the page no longer follows {self.followed}: {type(error).__name__}: {error}")
                logger.exception("the page no longer follows %s", self.followed)
                raise
            self._say(self._damage(), changed)
            if not busy:
                await asyncio.sleep(POLL_S)

    def _say(self, failure: str, changed: bool = False) -> None:
        """Tell every open page, if there is something new or another failure."""
        failure = printable(" ".join(failure.split()))
        if changed or failure != self.news.failure:
            self.news.failure = failure
            self.news.tell()

    async def _locked(self, work: Callable[[], T]) -> T:
        async with self._lock:
            return await asyncio.to_thread(work)

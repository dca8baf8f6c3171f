"""A stream of events to each open page: that there is something new, and what is damaged. Nothing is queued."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from megatron_scalerl.page.loopback import security_headers

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

"""The runs below a folder on 127.0.0.1, while they write: the list with its curves, and the page of each run.

The records of all runs are read and the missing fits are made, one at a time, as `news.Follower` says. The page of a
run is made when it is first opened and followed from then on; where `MOST_PAGES` are followed, one that nobody looks
at is closed for another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from aiohttp import web

from megatron_scalerl.page.loopback import LoopbackServer, answer, security_headers, whole_number
from megatron_scalerl.page.news import Follower
from megatron_scalerl.page.render import RUNS, page
from megatron_scalerl.page.runs_data import RunsData
from megatron_scalerl.page.server import RunPage

MOST_PAGES = 8
"""Pages of runs that are followed at a time."""


class RunsServer(LoopbackServer, Follower):
    """Serves the runs below a folder."""

    followed = "the runs"

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError for a folder without a run, OSError for one that cannot be read."""
        LoopbackServer.__init__(self)
        Follower.__init__(self)
        self._runs = RunsData(folder)
        self._failure = ""
        self._opening = asyncio.Lock()
        self._pages: dict[int, tuple[RunPage, contextlib.AsyncExitStack]] = {}

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[None]:
        """Serve within the block. port: 0 for one of the kernel's choice. Raises OSError."""
        handlers = {
            "/": self._page,
            "/api/runs": self._data,
            "/api/events": self.news.stream,
            "/run/{number}/{path:.*}": self._of_run,
        }
        async with contextlib.AsyncExitStack() as closing, self.following():
            closing.push_async_callback(self._close_pages)
            await closing.enter_async_context(self.listening(handlers, port))
            yield

    async def _close_pages(self) -> None:
        for _, stack in self._pages.values():
            await stack.aclose()

    async def _page(self, _: web.Request) -> web.Response:
        data = await self._locked(self._runs.payload) | {"live": True}
        text = await asyncio.to_thread(partial(page, RUNS, data, title=f"{data['folder']}: runs", live=True))
        return web.Response(text=text, content_type="text/html", headers=security_headers(RUNS))

    async def _data(self, request: web.Request) -> web.Response:
        return answer(await self._locked(partial(self._runs.payload, whole_number(request, "since"))))

    async def _of_run(self, request: web.Request) -> web.StreamResponse:
        """The page of one run, or what it asks for."""
        number = request.match_info["number"]
        if not number.isascii() or not number.isdigit() or len(number) > 9 or int(number) not in self._runs.runs:
            raise web.HTTPNotFound
        async with self._opening:
            opened = await self._opened(int(number))
        handler = opened.handlers.get(request.match_info["path"])
        if handler is None:
            raise web.HTTPNotFound
        return await handler(request)

    async def _opened(self, number: int) -> RunPage:
        if number in self._pages:
            self._pages[number] = self._pages.pop(number)  # the newest is the last
            return self._pages[number][0]
        unseen = [known for known, (each, _) in self._pages.items() if not each.news.heard]
        if len(self._pages) >= MOST_PAGES and unseen:
            await self._pages.pop(unseen[0])[1].aclose()
        opened = await asyncio.to_thread(partial(RunPage, self._runs.runs[number].run_dir, home="../../"))
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(opened.following())
        self._pages[number] = opened, stack
        return opened

    def _update(self) -> bool:
        self._failure = ""
        try:
            return self._runs.update()
        except (ValueError, OSError) as error:
            self._failure = str(error)
            return False

    def _damage(self) -> str:
        return self._failure

    async def _work(self) -> bool:
        """Make a missing fit; True if there was one."""
        number = await self._locked(self._runs.next_without_fit)
        if number is None:
            return False
        made = await asyncio.to_thread(self._runs.runs[number].made_fit)
        await self._locked(partial(self._runs.add_fit, number, *made))
        self.news.tell()
        return True

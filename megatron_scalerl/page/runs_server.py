"""The runs below a folder on 127.0.0.1, while they write: the list with its curves, and the page of each run.

One task, `_follow`, looks for new records of all runs every `POLL_S` and makes missing fits in a thread, one at a
time. The page of a run is made when it is first opened and followed from then on; where `MOST_PAGES` are followed,
one that nobody looks at is closed for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from megatron_scalerl.page.loopback import LoopbackServer, answer, security_headers, whole_number
from megatron_scalerl.page.news import News
from megatron_scalerl.page.render import RUNS, page
from megatron_scalerl.page.runs_data import RunsData
from megatron_scalerl.page.server import RunPage
from megatron_scalerl.processes.logs import printable

logger = logging.getLogger(__name__)
T = TypeVar("T")
POLL_S = 1.0
"""Seconds between two looks at the runs' files."""
MOST_PAGES = 8
"""Pages of runs that are followed at a time."""


class RunsServer(LoopbackServer):
    """Serves the runs below a folder."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError for a folder without a run, OSError for one that cannot be read."""
        super().__init__()
        self._runs = RunsData(folder)
        self._news = News()
        self._lock = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._pages: dict[int, tuple[RunPage, contextlib.AsyncExitStack]] = {}

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[None]:
        """Serve within the block. port: 0 for one of the kernel's choice. Raises OSError."""
        await self._locked(self._runs.update)
        handlers = {
            "/": self._page,
            "/api/runs": self._data,
            "/api/events": self._news.stream,
            "/run/{number}/{path:.*}": self._of_run,
        }
        async with self.listening(handlers, port):
            task = asyncio.create_task(self._follow(), name="follow runs")
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
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

    async def _follow(self) -> None:
        while True:
            failure, changed, busy = "", False, False
            try:
                changed = await self._locked(self._runs.update)
                busy = await self._fit()
            except (ValueError, OSError) as error:
                failure = printable(" ".join(str(error).split()))
            except Exception as error:
                text = f"the page no longer follows the runs: {type(error).__name__}: {error}"
                self._news.failure = printable(" ".join(text.split()))
                self._news.tell()
                logger.exception("the page no longer follows the runs")
                raise
            if changed or busy or failure != self._news.failure:
                self._news.failure = failure
                self._news.tell()
            if not busy:
                await asyncio.sleep(POLL_S)

    async def _fit(self) -> bool:
        """Make a missing fit; True if there was one."""
        number = await self._locked(self._runs.next_without_fit)
        if number is None:
            return False
        made = await asyncio.to_thread(self._runs.runs[number].made_fit)
        await self._locked(partial(self._runs.add_fit, number, *made))
        return True

    async def _locked(self, work: Callable[[], T]) -> T:
        async with self._lock:
            return await asyncio.to_thread(work)

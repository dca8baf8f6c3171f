"""The page of a run on 127.0.0.1, while the run writes: records by offset, completions when they are opened.

The records are read and the missing forecasts are made, one at a time, as `news.Follower` says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_scalerl.page.completions import Reader
from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.page.loopback import Handler, LoopbackServer, answer, security_headers, whole_number
from megatron_scalerl.page.news import Follower
from megatron_scalerl.page.render import RUN, page
from megatron_scalerl.page.run_data import RunData


class RunPage(Follower):
    """The page of one run and what it asks for. `home`: the address of the list that it belongs to, if any."""

    followed = "the run"

    def __init__(self, run_dir: str | Path, *, home: str | None = None) -> None:
        """Raises ValueError for a folder that is no run."""
        super().__init__()
        self._home = home
        self._run = RunData(run_dir)
        self._index = GroupIndex(Path(run_dir))
        self._reader = Reader(Path(run_dir), self._run.recipe, self._index)

    @property
    def handlers(self) -> dict[str, Handler]:
        """By path, relative to that of the page."""
        return {
            "": self._page,
            "api/data": self._data,
            "api/groups": self._groups,
            "api/group": self._group,
            "api/completion": self._completion,
            "api/events": self.news.stream,
        }

    async def _page(self, _: web.Request) -> web.Response:
        data = await self._locked(self._payload) | {"live": True, "home": self._home}
        made = partial(page, RUN, data, title=f"{data['header']['name']}: run", live=True)
        text = await asyncio.to_thread(made)
        return web.Response(text=text, content_type="text/html", headers=security_headers(RUN))

    async def _data(self, request: web.Request) -> web.Response:
        since, generation = whole_number(request, "since"), whole_number(request, "generation")
        known = since if generation == self._run.generation and since <= self._run.steps else 0
        return answer(await self._locked(partial(self._payload, known)))

    async def _groups(self, request: web.Request) -> web.Response:
        step = whole_number(request, "step")
        return answer({"groups": await self._locked(partial(self._index.of_step, step))})

    async def _group(self, request: web.Request) -> web.Response:
        return answer(await self._locked(partial(self._reader.group, whole_number(request, "id"))))

    async def _completion(self, request: web.Request) -> web.Response:
        group_id, position = whole_number(request, "id"), whole_number(request, "index")
        return answer(await self._locked(partial(self._reader.completion, group_id, position)))

    def _damage(self) -> str:
        return "; ".join([*self._run.damage, *self._index.damage])

    async def _work(self) -> bool:
        """Make the newest missing forecast; True if there was one."""
        forecasts, rows = self._run.forecasts, list(self._run.validations)
        missing = await self._locked(partial(forecasts.missing, rows))
        if not missing:
            return False
        made = await asyncio.to_thread(forecasts.attempt, rows, self._run.recipe, missing[0])
        await self._locked(partial(forecasts.add, missing[0], *made))
        if missing[0] == len(rows) or len(missing) == 1 or len(missing) % 10 == 0:
            self.news.tell()
        return True

    def _payload(self, since: int = 0) -> dict[str, Any]:
        data = self._run.payload(since) | {"trained_steps": self._index.steps}
        data["header"]["damage"] += self._index.damage
        return data

    def _update(self) -> bool:
        """Read what is new, of the records and of the journal alike; True if there is something."""
        return any([self._run.update(), self._index.update()])


class PageServer(LoopbackServer):
    """Serves one run."""

    def __init__(self, run_dir: str | Path) -> None:
        """Raises ValueError for a folder that is no run."""
        super().__init__()
        self._page = RunPage(run_dir)

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[None]:
        """Serve within the block. port: 0 for one of the kernel's choice. Raises ValueError, OSError."""
        handlers = {f"/{path}": handler for path, handler in self._page.handlers.items()}
        async with self._page.following(), self.listening(handlers, port):
            yield

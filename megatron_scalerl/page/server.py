"""Serves the page of a run, or a list of the runs below a folder, on 127.0.0.1 while the runs write.

Every request needs the token of this start, compared in constant time, and a Host header that names this address: a
page of another site that reaches the port under that site's name is refused. The server stores no data.

The life of a page: `following` begins one task, which looks for new rows once a second and makes missing forecasts
one at a time. The task reads in threads, so that the event loop does not wait for a disk. An open page has a stream
of events: `change` for new rows, after which the page asks for the data, and `failed` for damaged files. The task
ends with the block of `following`, the streams end with the server. The list of runs is read anew for each request
and follows no file; the first request of a run's page makes the page, which is followed from then on.
"""

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from megatron_scalerl.page.completions import Reader
from megatron_scalerl.page.find_runs import find_runs
from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.page.render import PROGRAMS, page, policy, runs_page
from megatron_scalerl.page.run_data import RunData
from megatron_scalerl.processes.child_process import cancelled
from megatron_scalerl.processes.logs import printable

logger = logging.getLogger(__name__)
ADDRESS = "127.0.0.1"
HTTP_PORT = 80
POLL_S = 1.0
"""Seconds between two reads of the run's files."""
KEEP_ALIVE_S = 15.0
"""Seconds after which a stream without news sends a comment, so that a closed stream is noticed."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class RunPage:
    """The page of one run: follows the run's files, notifies the open streams, and answers requests.

    All reading is done under one lock, in threads.
    """

    def __init__(self, run_dir: Path, *, home: str | None = None):
        """home: the address of the list that the page belongs to, if any. Raises ValueError for a folder that is no
        run."""
        self.failure = ""
        """One line about damaged files; empty without damage."""
        self.streams: set[asyncio.Event] = set()
        """An event for each open page; set when the page is to ask for the data."""
        self._lock = asyncio.Lock()
        self._home = home
        self._run = RunData(run_dir)
        self._index = GroupIndex(run_dir)
        self._reader = Reader(run_dir, self._run.recipe, self._index)
        self._handlers: dict[str, Handler] = {
            "": self._page,
            "api/data": self._data,
            "api/groups": self._reading(lambda step: {"groups": self._index.of_step(step)}, "step"),
            "api/group": self._reading(self._reader.group, "id"),
            "api/completion": self._reading(self._reader.completion, "id", "index"),
            "api/events": self._events,
        }

    async def handler(self, path: str) -> Handler | None:
        """The function that answers requests for a path; None for an unknown path."""
        return self._handlers.get(path)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Read the run's new records until the end of the block. Damaged files are named on the page."""
        await self._locked(self._update)
        self._say(self._damage())
        if self.failure:
            logger.warning("%s", self.failure)
        task = asyncio.create_task(self._follow(), name="follow the run")
        try:
            yield
        finally:
            await cancelled(task)

    async def _follow(self) -> None:
        while True:
            try:
                changed = await self._locked(self._update)
                busy = await self._work()
            except Exception as error:
                self._say(f"the page no longer follows the run: {type(error).__name__}: {error}; start watch again")
                logger.exception("the page no longer follows the run")
                raise
            self._say(self._damage(), changed)
            if not busy:
                await asyncio.sleep(POLL_S)

    def _say(self, failure: str, changed: bool = False) -> None:
        """Notify every open page if there are new rows (`changed`), or if `failure` is not the previous failure."""
        failure = printable(" ".join(failure.split()))
        if changed or failure != self.failure:
            self.failure = failure
            self._tell()

    def _tell(self) -> None:
        for news in self.streams:
            news.set()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """A stream of events: `change` for new rows, `failed` with a line about damaged files."""
        response = web.StreamResponse(headers=security_headers() | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        news = asyncio.Event()
        sent_failure = ""
        self.streams.add(news)
        news.set()  # rows may be new since the page was sent
        try:
            while True:
                try:
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    await response.write(b": still here\n\n")
                    continue
                # the event is cleared before the writes, so that news during the writes set the event again and are
                # sent next
                news.clear()
                if self.failure != sent_failure:
                    sent_failure = self.failure
                    await response.write(b"event: failed\ndata: " + msgspec.json.encode(sent_failure) + b"\n\n")
                await response.write(b"event: change\ndata: 1\n\n")
        except ConnectionResetError:
            return response
        finally:
            self.streams.discard(news)

    async def _locked(self, work: Callable[[], T]) -> T:
        async with self._lock:
            return await asyncio.to_thread(work)

    async def _page(self, _: web.Request) -> web.Response:
        data = await self._locked(self._payload) | {"live": True, "home": self._home}
        title = f"{data['header']['name']}: run"
        text = await asyncio.to_thread(partial(page, data, title=title, live=True))
        return page_answer(text, PROGRAMS)

    async def _data(self, request: web.Request) -> web.Response:
        since = whole_number(request, "since")
        generation = whole_number(request, "generation")
        if generation != self._run.generation or since > self._run.steps:
            since = 0  # a restart dropped steps that the page has: the page gets all steps anew
        return answer(await self._locked(partial(self._payload, since)))

    def _reading(self, read: Callable[..., Any], *names: str) -> Handler:
        """A handler that calls `read` and answers with the result as JSON. names: the request parameters, all whole
        numbers, that are passed to `read` in this order."""

        async def handle(request: web.Request) -> web.Response:
            return answer(await self._locked(partial(read, *(whole_number(request, name) for name in names))))

        return handle

    def _payload(self, since: int = 0) -> dict[str, Any]:
        data = self._run.payload(since) | {"trained_steps": self._index.steps}
        data["header"]["damage"] += self._index.damage
        return data

    def _update(self) -> bool:
        """Read new rows of the records and of the journal; True for a new row."""
        # a list, so that the journal is read even if the records have new rows
        return any([self._run.update(), self._index.update()])

    def _damage(self) -> str:
        return "; ".join([*self._run.damage, *self._index.damage])

    async def _work(self) -> bool:
        """Make the missing forecast from the most validations; False if no forecast is missing."""
        forecasts = self._run.forecasts
        rows = list(self._run.validations)
        missing_counts = await self._locked(partial(forecasts.missing_counts, rows))
        if not missing_counts:
            return False
        # the forecast is made without the lock, so that requests are answered meanwhile
        result = await asyncio.to_thread(forecasts.attempt, rows, self._run.recipe, missing_counts[0])
        await self._locked(partial(forecasts.add, missing_counts[0], *result))
        # the page is told after every tenth forecast: an old run needs a hundred forecasts, and each news redraws all
        # charts
        if missing_counts[0] == len(rows) or len(missing_counts) == 1 or len(missing_counts) % 10 == 0:
            self._tell()
        return True


class RunsPage:
    """The list of the runs below a folder, and the page of each run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._runs: list[Path] = []
        """All runs found so far. The index in this list is the run's number, even after the folder is gone."""
        self._open_lock = asyncio.Lock()
        self._open_pages = contextlib.AsyncExitStack()
        self._pages: dict[int, RunPage] = {}
        """Number of a run -> page of the run. `_open_pages` ends the tasks that read the runs' records."""

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """At the end of the block, end the tasks of all pages of runs that were made."""
        async with self._open_pages:
            yield

    async def handler(self, path: str) -> Handler | None:
        """The function that answers requests for a path; the first request of a run's page makes the page."""
        if not path:
            return self._page
        match = re.fullmatch("run/([0-9]{1,9})/(.*)", path)
        if match is None or int(match[1]) >= len(self._runs):
            return None
        number = int(match[1])
        # the lock makes the second of two simultaneous first requests wait for the page that the first one makes
        async with self._open_lock:
            if number not in self._pages:
                run_page = await asyncio.to_thread(partial(RunPage, self._runs[number], home="../../"))
                await self._open_pages.enter_async_context(run_page.following())
                self._pages[number] = run_page
        return await self._pages[number].handler(match[2])

    async def _page(self, request: web.Request) -> web.Response:
        search = await asyncio.to_thread(find_runs, self._folder)
        known_paths = set(self._runs)
        self._runs += [path for path in search.runs if path not in known_paths]
        query = request.rel_url.raw_query_string
        addresses = {path: f"run/{number}/?{query}" for number, path in enumerate(self._runs)}
        return page_answer(await asyncio.to_thread(runs_page, self._folder, search, addresses))


class PageServer:
    """Serves the page of a run, or the list of runs, on 127.0.0.1. `token`, which every request needs, is new at
    every start."""

    def __init__(self, page: RunPage | RunsPage):
        self.page = page
        self.token = secrets.token_urlsafe(32)
        self.port = 0

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[None]:
        """Answer requests until the end of the block. port: 0 lets the kernel choose. Raises OSError for a port that
        is taken."""
        app = web.Application(middlewares=[self._guard])
        # one route serves all paths: pages of runs come and go, and a router cannot change while serving
        app.router.add_get("/{path:.*}", self._answer)
        # 1 s, since open event streams end only with the server, and aiohttp would wait 60 s for a stream by default
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        async with self.page.following():
            await runner.setup()
            try:
                await web.TCPSite(runner, ADDRESS, port).start()
                self.port = runner.addresses[0][1]
                yield
            finally:
                await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        handler = await self.page.handler(request.match_info["path"])
        if handler is None:
            raise web.HTTPNotFound
        return await handler(request)

    def _names(self) -> set[str]:
        """The values of a request's Host header that the server accepts."""
        names = {ADDRESS, "localhost"}
        hosts = {f"{name}:{self.port}" for name in names}
        if self.port == HTTP_PORT:  # clients leave out port 80 in the Host header
            hosts |= names
        return hosts

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        token = request.query.get("token", "")
        # compare_digest takes bytes, or texts of ASCII alone, and a query may hold any text
        if host not in self._names() or not hmac.compare_digest(token.encode("utf8", "replace"), self.token.encode()):
            return answer({"error": "wrong token or Host: open the address that megatron-scalerl watch printed"}, 403)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return answer({"error": error.reason}, error.status)
        except (ValueError, OSError) as error:
            return answer({"error": " ".join(str(error).split())}, 422)


def whole_number(request: web.Request, name: str) -> int:
    """A parameter of the request as a number. Raises ValueError unless the text is a whole number >= 0."""
    text = request.query.get(name, "")
    if re.fullmatch("[0-9]{1,18}", text) is None:
        raise ValueError(f"{name}: expected a whole number, found {text[:40]!a}")
    return int(text)


def answer(body: Any, status: int = 200) -> web.Response:
    """A JSON response. body: any value that msgspec encodes."""
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json", headers=security_headers())


def page_answer(text: str, programs: Sequence[Path] = ()) -> web.Response:
    """The response with a page. programs: the JavaScript that may run in the page."""
    return web.Response(text=text, content_type="text/html", headers=security_headers(programs))


def security_headers(programs: Sequence[Path] = PROGRAMS) -> dict[str, str]:
    """The headers of every response. programs: the JavaScript that may run in the page."""
    return {
        "Cache-Control": "no-store",
        "Content-Security-Policy": f"{policy(programs, live=True)}; frame-ancestors 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

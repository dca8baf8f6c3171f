"""A server on 127.0.0.1 for the one who started it: a token of its own, its own names, nothing stored.

Every request needs the token of this start, compared in constant time, and a Host header that names this address: a
page of another site that reaches the port under its own name is refused.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from megatron_scalerl.page.render import RUN, Document, policy

ADDRESS = "127.0.0.1"
HTTP_PORT = 80
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LoopbackServer:
    """Answers GET requests with the token. `token` is new at every start."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self.port = 0

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    @contextlib.asynccontextmanager
    async def listening(self, handlers: Mapping[str, Handler], port: int) -> AsyncIterator[None]:
        """Answer within the block. handlers: by path; port: 0 for one of the kernel's choice. Raises OSError."""
        app = web.Application(middlewares=[self._guard])
        for path, handler in handlers.items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, ADDRESS, port)
            await site.start()
            self.port = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()

    def _names(self) -> set[str]:
        """Host headers of this server. Clients leave out the port of http."""
        ports = ("", f":{self.port}") if self.port == HTTP_PORT else (f":{self.port}",)
        return {f"{name}{port}" for name in (ADDRESS, "localhost") for port in ports}

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        given = request.query.get("token", "")
        if host not in self._names() or not hmac.compare_digest(given.encode("utf8", "replace"), self.token.encode()):
            return answer({"error": "expected the address that megatron-scalerl watch printed, with its token"}, 403)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return answer({"error": error.reason}, error.status)
        except (ValueError, OSError) as error:
            return answer({"error": " ".join(str(error).split())}, 422)


def whole_number(request: web.Request, name: str) -> int:
    """A parameter of the request. Raises ValueError unless it is a whole number from 0 on."""
    text = request.query.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError(f"{name}: expected a whole number, found {text[:40]!a}")
    return int(text)


def answer(body: Any, status: int = 200) -> web.Response:
    """A JSON response. body: what msgspec encodes."""
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json", headers=security_headers())


def security_headers(document: Document = RUN) -> dict[str, str]:
    """The headers of every response. document: whose programs may run."""
    return {
        "Cache-Control": "no-store",
        "Content-Security-Policy": f"{policy(document, live=True)}; frame-ancestors 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

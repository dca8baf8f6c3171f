"""Inside a test's engine: reports the routes of the server's app, and the requests that reached it."""

import json

from starlette.routing import Mount, WebSocketRoute

PATH = "/test/insight"


class Insight:
    """A middleware for `engine.vllm.middleware`. Answers {"routes": [[kind, path]], "reached": [[method, path]]}."""

    def __init__(self, app):
        self._app = app
        self._reached = []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan" or scope["path"] in ("/health", "/msrl/progress"):
            await self._app(scope, receive, send)
        elif scope["path"] == PATH:
            answer = {"routes": list(_routes(scope["app"].routes, "")), "reached": self._reached}
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
        else:
            self._reached.append([scope.get("method", scope["type"]), scope["path"]])
            await self._app(scope, receive, send)


def _routes(routes, prefix):
    for route in routes:
        path = prefix + route.path
        if isinstance(route, Mount):
            yield ["mount", path]
            yield from _routes(route.routes or [], path)
        else:
            yield ["websocket" if isinstance(route, WebSocketRoute) else "http", path]

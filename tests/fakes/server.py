"""Responses as engines write them, and a stand-in server that gives them."""

import json

from aiohttp import web

from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.recipe.process_sections import EngineSection


def answer(logprobs=(-0.5, -0.25), token_ids=(5, 6), **changes):
    """The answer to a generation as vLLM writes it."""
    choice = {
        "token_ids": list(token_ids),
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": value} for value in logprobs]},
        "weight_versions": [{"version": "3", "start": 0, "end": len(token_ids)}],
    }
    return {"choices": [choice | changes]}


class StandInServer:
    """Responds with the given bodies in turn, and then with the last one, on every path.

    A body is bytes, JSON, or a coroutine function that responds to the request itself.
    """

    def __init__(self, *bodies, **settings):
        """settings: of EngineSection."""
        self._bodies = list(bodies)
        self._settings = EngineSection(**{"max_lost_in_a_row": 3, **settings})

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._give)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.client = EngineClient(url=self.url, secret="s", name="engine-4", settings=self._settings)
        return self.client

    async def __aexit__(self, *_):
        await self.client.close()
        await self._runner.cleanup()

    async def _give(self, request):
        body = self._bodies.pop(0) if len(self._bodies) > 1 else self._bodies[0]
        if callable(body):
            return await body(request)
        return web.Response(body=body if isinstance(body, bytes) else json.dumps(body).encode())

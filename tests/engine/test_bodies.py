"""Responses that are too slow or broken off, and the end of a request."""

import asyncio
import contextlib
import gzip
import json
import re

import pytest
from aiohttp import web
from fakes.server import StandInServer, answer
from waiting import passes, until

from megatron_scalerl.engine.answers import EngineError, EngineLost
from megatron_scalerl.engine.client import SamplingSpec

SPEC = SamplingSpec(max_tokens=2)


async def slow(request):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


async def silent(request):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b" ")
    while request.transport is not None:
        await asyncio.sleep(0.05)
    return response


async def half(request):
    whole = json.dumps(answer()).encode()
    response = web.StreamResponse(headers={"Content-Length": str(len(whole))})
    await response.prepare(request)
    await response.write(whole[:-20])
    request.transport.close()
    return response


async def compressed(request):
    """A small response that unpacks to a large one."""
    return web.Response(body=gzip.compress(b" " * 10**8), headers={"Content-Encoding": "gzip"})


CASES = {
    slow: ".*/inference/v1/generate: only a part of the response came within 1 s of its header",
    silent: ".*/inference/v1/generate: only a part of the response came within 1 s of its header",
    half: "engine-4: POST /inference/v1/generate: ClientPayloadError: ",
    compressed: "engine-4: /inference/v1/generate: the answer is not valid: ",
}


@pytest.mark.parametrize("respond", CASES, ids=lambda respond: respond.__name__)
async def test_it_is_an_engine_error_in_one_line(respond):
    async with StandInServer(respond, stall_timeout_s=1.0 if respond in (slow, silent) else 240.0) as client:
        with pytest.raises(EngineError) as error:
            await client.generate([1], sampling=SPEC)
        assert (client.in_flight, client.ended_generations) == (0, 1)
    line = str(error.value)
    assert line.startswith("engine-4: ")
    assert re.match(CASES[respond], line) and "\n" not in line


async def test_an_engine_that_has_answered_is_not_waited_for():
    """`in_flight` is what the watchdog expects tokens for."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def respond(request):
        response = web.StreamResponse()
        await response.prepare(request)
        begun.set()
        await go_on.wait()
        await response.write(json.dumps(answer()).encode())
        return response

    async with StandInServer(respond) as client:
        call = asyncio.create_task(client.generate([1], sampling=SPEC))
        await passes(1)
        assert client.in_flight == 1
        await begun.wait()
        await until(lambda: not client.in_flight)
        go_on.set()
        assert (await call).token_ids == (5, 6)


class StandInDecoder:
    """Says when it has a body, and decodes it when it is told to."""

    def __init__(self):
        self.has_body, self.go_on = asyncio.Event(), asyncio.Event()

    def slot(self):
        return contextlib.nullcontext()

    async def decode(self, body, **_):
        self.has_body.set()
        await self.go_on.wait()
        return "decoded", 2


async def test_an_evicted_engine_loses_what_it_has_not_answered_and_keeps_what_is_being_decoded():
    decoder = StandInDecoder()
    async with StandInServer(answer(), silent) as client:
        calls = []
        for _ in range(2):
            calls.append(asyncio.create_task(client.generate([1], sampling=SPEC, decoder=decoder)))
            await decoder.has_body.wait()
        await until(lambda: not client.in_flight)
        client.abort("killed")
        decoder.go_on.set()
        kept, lost = await asyncio.gather(*calls, return_exceptions=True)
        assert (kept, client.received_tokens) == ("decoded", 2)
    assert isinstance(lost, EngineLost) and str(lost) == "engine-4: killed"

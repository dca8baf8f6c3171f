"""A stand-in for one vLLM server: its HTTP interface, its pauses and its weight transfer, and no policy.

    python tests/fakes/engine_server.py --model FOLDER ...    (vLLM's arguments, the environment of engine.process)

A completion is a function of its sampling seed alone, so that runs with and without faults can be compared. Tokens
appear at a fixed rate while the engine is not paused. Weights arrive over the same group, in the same buckets and
with the same digests as in a real engine; every update's version and digest are printed. For fault injection: while
the file $STAND_IN_FAULTS/NAME exists, the engine of this name answers generations as the file's content says.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import ssl
from itertools import pairwise
from pathlib import Path

import msgspec
from aiohttp import web
from tokenizers import Tokenizer

from megatron_scalerl.processes.logs import NAME_VARIABLE
from megatron_scalerl.weights.digest import combine
from megatron_scalerl.weights.plan import Connection, all_of, from_json, manifest_from_json, needs_to_json
from megatron_scalerl.weights.transport import join_sender
from megatron_scalerl.weights.transport.frames import receive

TOKEN_S = 0.015
"""Seconds per token of every completion, however many there are."""


class StandInEngineServer:
    """State and routes of the server."""

    def __init__(self, arguments):
        folder = Path(arguments.model)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        self.vocabulary = int(config["vocab_size"])
        self.end = int(config["eos_token_id"])
        self.think_end = tokenizer.encode("</think>", add_special_tokens=False).ids
        self.digits = [tokenizer.encode(str(n), add_special_tokens=False).ids[-1] for n in range(10)]
        self.name = os.environ.get(NAME_VARIABLE, "engine")
        self.secret = os.environ["MSRL_SECRET"]
        self.max_model_len = arguments.max_model_len
        self.running = asyncio.Event()
        self.running.set()
        self.version, self.digest = "0", ""
        self.tokens = self.waiting = 0
        self.groups = {}
        self.plan = None
        self.updating = False

    def app(self):
        """The application; every path but /health requires the run's secret."""

        @web.middleware
        async def secret(request, handler):
            if request.path != "/health" and request.headers.get("X-Run-Secret") != self.secret:
                raise web.HTTPUnauthorized
            return await handler(request)

        app = web.Application(middlewares=[secret], client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/msrl/progress", self.progress),
                web.get("/get_world_size", self.world_size),
                web.get("/weight_info", self.weight_info),
                web.post("/inference/v1/generate", self.generate),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.post("/collective_rpc", self.rpc),
                web.post("/update_weight_version", self.label),
                web.post("/init_weight_transfer_engine", self.connect),
                web.post("/start_weight_update", self.start),
                web.post("/update_weights", self.update),
                web.post("/finish_weight_update", self.finish),
            ]
        )
        return app

    async def health(self, _):
        return web.json_response({})

    async def progress(self, _):
        core = {"core": 0, "tokens": self.tokens, "waiting": 0, "decoding": self.waiting}
        return web.json_response({"cores": [core], "dead": False})

    async def world_size(self, _):
        return web.json_response({"world_size": 1})

    async def weight_info(self, _):
        return web.json_response({"weight_version": self.version})

    async def pause(self, _):
        self.running.clear()
        return web.json_response({})

    async def resume(self, _):
        self.running.set()
        return web.json_response({})

    async def rpc(self, request):
        called = await request.json()
        if called["method"] == "msrl_abandon_update":
            self.updating = False
            return web.json_response({"results": [None]})
        if called["method"] == "msrl_live_digest":  # it holds no weights
            return web.json_response({"results": [""]})
        if called["method"] == "msrl_weight_needs":
            everything = all_of(manifest_from_json(called["args"][0]))
            return web.json_response({"results": [needs_to_json(everything)]})
        info = {
            "vocab_size": self.vocabulary,
            "dtype": "float32",
            "head_dtype": "float32",
            "logprobs_mode": "raw_logprobs",
            "max_model_len": self.max_model_len,
            "pid": os.getpid(),
            "weight_digest": self.digest,
            "attention_temperature": None,
        }
        return web.json_response({"results": [info]})

    async def label(self, request):
        self.version = (await request.json())["new_version"]
        return web.json_response({})

    async def connect(self, request):
        info = (await request.json())["init_info"]
        for group in self.groups.values():
            group.close()
        self.groups = {}
        connection = msgspec.convert(info["connection"], Connection)
        [[shard, rank]] = info["places"]
        self.plan = from_json(info["plans"][shard])
        for sender, _ in sorted(self.plan.pairs):
            self.groups[sender] = await asyncio.to_thread(join_sender, connection, rank, sender, shard)
        return web.json_response({})

    async def start(self, _):
        if self.updating:  # as vLLM does
            raise web.HTTPInternalServerError(
                text="start_weight_update called while a weight update is already active"
            )
        self.updating = True
        return web.json_response({})

    async def update(self, request):
        version = (await request.json())["update_info"]["version"]
        digests = []
        self.digest = ""

        def take():
            for _ in receive(self.groups, self.plan, version, digests):
                pass

        try:
            await asyncio.to_thread(take)
        except BaseException:
            self.updating = False
            for group in self.groups.values():
                group.close()
            raise
        self.digest = combine(digests)
        print(f"version {version} digest {self.digest}", flush=True)
        return web.json_response({})

    async def finish(self, request):
        self.updating = False
        self.version = (await request.json())["weight_version"]
        return web.json_response({})

    async def generate(self, request):
        body = await request.json()
        fault = self._fault()
        if fault == "nothing":
            await asyncio.Event().wait()
        source = random.Random(body["sampling_params"]["seed"])
        thought = [source.choice(self.digits) for _ in range(source.randint(2, 40))]
        tokens = [*thought, *self.think_end, source.choice(self.digits), self.end]
        versions = []
        self.waiting += 1
        try:
            for _ in tokens:
                await asyncio.sleep(TOKEN_S)
                await self.running.wait()
                versions.append(self.version)
                self.tokens += 1
        finally:
            self.waiting -= 1
        if fault == "wrong version":
            versions = ["999999"] * len(versions)
        answer = json.dumps({"choices": [_choice(tokens, versions)]}).encode()
        if fault == "garbage":
            answer = random.Random(0).randbytes(len(answer))
        if fault == "half":
            answer = answer[: len(answer) // 2]
        return web.Response(body=answer, content_type="application/json")

    def _fault(self):
        folder = os.environ.get("STAND_IN_FAULTS")
        path = Path(folder, self.name) if folder else None
        return path.read_text() if path is not None and path.exists() else ""


def _choice(tokens, versions):
    edges = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    spans = [{"version": versions[a], "start": a, "end": b} for a, b in pairwise(edges)]
    return {
        "token_ids": tokens,
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -2.0}] * len(tokens)},
        "weight_versions": spans,
    }


async def serve(arguments):
    """Serve until SIGTERM."""
    runner = web.AppRunner(StandInEngineServer(arguments).app(), shutdown_timeout=0.1)
    await runner.setup()
    context = None
    if arguments.ssl_certfile is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile)
    listening = socket.socket(fileno=int(os.environ.pop("MSRL_LISTEN_FD")))
    await web.SockSite(runner, listening, ssl_context=context).start()
    ready = int(os.environ.pop("MSRL_READY_FD"))
    os.write(ready, b"1")
    os.close(ready)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--max-model-len", type=int, default=1 << 20)
    asyncio.run(serve(parser.parse_known_args()[0]))

"""Stand-in engines for tools/bench_controller.py: HTTP servers that give prepared responses after a delay.

    python tools/stand_in_engines.py '{"engines": 5, "tokens": 14336, "thinking": 12000, "delay": 40, "seed": 0}'

thinking: tokens before the closing tag. delay: seconds, in the mean.

They cost little processor time: a response is encoded once, in the fields that vLLM 0.32 writes, and sent by the
kernel out of a file in memory; only the policy version in front of it is written per request. A request waits between
half and one and a half delays, uniformly. Prints the servers' ports as a JSON list and serves until its input is
closed. Standard library alone. `accept` is a verifier for `rewards.verifier`.
"""

import asyncio
import json
import os
import random
import struct
import sys
from types import SimpleNamespace

VARIANTS = 16
"""Different responses of one process."""
THINK_END = (4,)
"""Tokens of the closing tag (`tiny.tokenizer`)."""
ANSWER = range(6, 16)
"""Tokens of answers."""


def accept(answer_text, reference, extra):
    """About half of all answers: a verifier that takes no time."""
    return sum(answer_text.encode()) % 2 == 0


def response(tokens, thinking, source):
    """The JSON of a response behind its policy versions. thinking: tokens before the closing tag."""
    ids = [source.randrange(100_000, 128_000) for _ in range(thinking)]
    ids += THINK_END
    ids += [source.choice(ANSWER) for _ in range(tokens - len(ids))]
    content = []
    for token in ids:
        [logprob] = struct.unpack("<f", struct.pack("<f", -source.expovariate(3.0)))
        candidate = {"token_id": token, "logprob": logprob, "rank": 1}
        content.append({**candidate, "top_logprobs": [candidate]})
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
        "logprobs": {"content": content},
    }
    rest = json.dumps(choice, separators=(",", ":"))[1:]
    return f'{rest}],"request_id":"{"0" * 32}","prompt_logprobs":null,"kv_transfer_params":null}}'.encode()


class StandInEngine:
    """A server of responses."""

    def __init__(self, files, tokens, delay_s, source):
        """files: of the prepared responses."""
        self._files = files
        self._tokens = tokens
        self._delay_s = delay_s
        self._source = source
        self.version = 0

    async def serve(self, reader, writer):
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if "/inference/v1/generate" in head[0]:
                    await self._complete(writer)
                    continue
                if "/update_weight_version" in head[0]:
                    self.version = int(json.loads(body)["new_version"])
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                await writer.drain()
                return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer):
        version = self.version
        file = self._source.choice(self._files)
        await asyncio.sleep(self._delay_s * self._source.uniform(0.5, 1.5))
        span = f'{{"choices":[{{"weight_versions":[{{"version":"{version}","start":0,"end":{self._tokens}}}],'
        size = len(span) + os.fstat(file).st_size
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        writer.write((head + span).encode())
        await writer.drain()
        with os.fdopen(os.open(f"/proc/self/fd/{file}", os.O_RDONLY), "rb") as body:  # an offset of its own
            await asyncio.get_running_loop().sendfile(writer.transport, body)


async def _serve(arguments):
    source = random.Random(arguments.seed)
    files = []
    for number in range(VARIANTS):
        body = response(arguments.tokens, arguments.thinking, source)
        file = os.memfd_create(f"response-{number}")
        with os.fdopen(os.dup(file), "wb") as output:
            output.write(body)
        files.append(file)
    ports = []
    for _ in range(arguments.engines):
        engine = StandInEngine(files, arguments.tokens, arguments.delay, source)
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=2048)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(SimpleNamespace(**json.loads(sys.argv[1]))))

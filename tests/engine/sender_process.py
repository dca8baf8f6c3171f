"""A trainer's sending rank for tests: a separate process with the weights of a Hugging Face folder.

Run as a program it reads JSON commands from its input and answers one JSON line each. It never loads vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec


class SenderProcess:
    """The trainer's side of `WeightSync`, run in the process. `folder` and `fault` apply to each send."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fault = folder, ""
        self._process: asyncio.subprocess.Process | None = None
        self._resources = contextlib.ExitStack()

    async def __aenter__(self) -> "SenderProcess":
        from megatron_scalerl.distributed.rendezvous import private_folder

        self.rendezvous = self._resources.enter_context(private_folder())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._resources.close()

    async def weight_plan(self) -> Any:
        from megatron_scalerl.weights.plan import manifest_of, whole

        return whole(manifest_of(await self._ask("manifest", folder=str(self.folder))))

    async def connect_weights(self, connection: Any) -> None:
        await self._ask("connect", connection=msgspec.to_builtins(connection))

    async def send_weights(self, version: int) -> Any:
        from megatron_scalerl.weights.connection import SendReport

        report = await self._ask("send", folder=str(self.folder), version=version, fault=self.fault)
        return msgspec.convert(report, SendReport)

    async def _ask(self, command: str, **values: Any) -> Any:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **values}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the sending process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def _faulty(sender: Any, fault: str) -> None:
    """Stand-in faults on the wire: a flipped bit after the digest was taken, or death after the first bucket."""
    ship = sender._ship

    def faulty(packed: Any) -> Any:
        if fault == "flip":
            packed[1000] ^= 1
        finish = ship(packed)
        if fault == "die":
            finish()
            os._exit(1)
        return finish

    sender._ship = faulty


def main() -> None:
    import safetensors.torch
    import torch

    from megatron_scalerl.weights.connection import Connection, SendReport
    from megatron_scalerl.weights.digest import combine
    from megatron_scalerl.weights.plan import buckets, manifest_of, whole
    from megatron_scalerl.weights.transport import make_sender

    torch.set_num_threads(1)
    sender: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["command"] == "connect":
                sender, value = make_sender(msgspec.convert(command["connection"], Connection)), None
            else:
                weights = safetensors.torch.load_file(Path(command["folder"]) / "model.safetensors")
                value = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in weights.items()]
            if command["command"] == "send":
                _faulty(sender, command["fault"])
                plan, tensors = whole(manifest_of(value)), list(weights.values())
                digests = sender.send(plan, tensors.__getitem__, command["version"])
                size = sum(bucket.nbytes for bucket in buckets(plan, sender.group.bucket_mib))
                value = msgspec.to_builtins(SendReport(seconds=0.0, bytes=size, digest=combine(digests)))
            answer = {"value": value}
        except (RuntimeError, ValueError) as err:
            answer = {"error": f"{type(err).__name__}: {err}"}
        print(json.dumps(answer), flush=True)
    assert "vllm" not in sys.modules


if __name__ == "__main__":
    main()

"""A trainer's sending rank for tests: a separate process with the weights of a Hugging Face folder.

Run as a program it reads JSON commands from its input and answers one JSON line each. It never loads vLLM.
"""

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
from command_process import CommandProcess, serve


class SenderProcess:
    """The trainer's side of `WeightSync`, run in the process. `folder` is sent; `dies`: after the first bucket."""

    def __init__(self, folder):
        self.folder, self.dies = folder, False
        self._process = CommandProcess(__file__)
        self._resources = contextlib.ExitStack()

    async def __aenter__(self):
        from megatron_scalerl.distributed.rendezvous import private_folder

        self.rendezvous = self._resources.enter_context(private_folder())
        await self._process.start()
        return self

    async def __aexit__(self, *_):
        await self._process.stop()
        self._resources.close()

    async def manifest(self):
        from megatron_scalerl.weights.plan import manifest_of

        return manifest_of(await self._ask("manifest", folder=str(self.folder)))

    async def plan_weights(self, needs):
        from megatron_scalerl.weights.plan import from_json

        return from_json(await self._ask("plan", folder=str(self.folder), needs=msgspec.to_builtins(needs)))

    async def connect_weights(self, connection):
        _raise(await self._ask("connect", connection=msgspec.to_builtins(connection)))

    async def send_weights(self, version):
        from megatron_scalerl.weights.plan import SendReport

        report = await self._ask("send", folder=str(self.folder), version=version, dies=self.dies)
        _raise(report["failure"])
        return msgspec.convert(report, SendReport)

    async def _ask(self, command, **values):
        answer = await self._process.ask({"command": command, **values})
        if answer is None:
            raise RuntimeError("the sending process ended")
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def _raise(failure):
    """As the trainer's client."""
    if failure:
        raise RuntimeError(failure)


def digest_of(folder):
    """Digest of the values of a policy's file."""
    from safetensors.torch import load_file
    from weights.transfers import digest_of

    return f"{digest_of(load_file(folder / 'model.safetensors')):016x}"


def _die(sender):
    """With the first bucket on its way."""
    ship = sender._ship

    def dying(shard, packed):
        ship(shard, packed)()
        os._exit(1)

    sender._ship = dying


class Source:
    """What a sending side reads: every tensor of a file as a whole, of a trainer of one rank."""

    sender = 0
    parallel = SimpleNamespace(world_size=1, rank=0, device="cpu")

    def begin(self):
        """There is nothing to gather."""

    def parts(self):
        return []

    def named(self):
        return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in self.weights.items()]

    def plan_for(self, needs):
        from megatron_scalerl.weights.plan import Part, WeightPlan, manifest_of

        parts = [
            Part(number, 0, shard, ranges)
            for number in range(len(self.weights))
            for shard, of_shard in enumerate(needs)
            for ranges in of_shard[number]
        ]
        self.plan = WeightPlan(parameters=manifest_of(self.named()), senders=1, needs=needs, parts=tuple(parts))
        return self.plan

    def as_sent(self, number):
        part = self.plan.parts[number]
        return list(self.weights.values())[part.tensor][tuple(slice(a, b) for a, b in part.ranges)]


def main():
    import safetensors.torch
    import torch

    from megatron_scalerl.weights import plan as plans
    from megatron_scalerl.weights import sending as module

    torch.set_num_threads(1)
    module.dist = SimpleNamespace(all_reduce=lambda table: table)  # stands in for a world of one
    source = Source()
    sending = module.WeightSending(source, bucket_mib=1)

    def answer(command):
        kind = command["command"]
        if "folder" in command:
            source.weights = safetensors.torch.load_file(Path(command["folder"]) / "model.safetensors")
        if kind == "manifest":
            return source.named()
        if kind == "plan":
            return plans.to_json(source.plan_for(msgspec.convert(command["needs"], tuple[plans.Needs, ...])))
        if kind == "connect":
            return sending.connect(msgspec.convert(command["connection"], plans.Connection))
        if command["dies"]:
            _die(sending._sender)
        return msgspec.to_builtins(sending.send(command["version"]))

    serve(answer, sys.stdout)
    assert "vllm" not in sys.modules


if __name__ == "__main__":
    main()

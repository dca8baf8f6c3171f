"""A trainer's sending rank for tests: a separate process with the weights of a Hugging Face folder.

Run as a program it reads JSON commands from its input and answers one JSON line each. It never loads vLLM.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import msgspec
from command_process import CommandProcess


class SenderProcess:
    """The trainer's side of `WeightSync`, run in the process. `folder` and `fault` apply to each send."""

    def __init__(self, folder):
        self.folder, self.fault = folder, ""
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
        await self._ask("connect", connection=msgspec.to_builtins(connection))

    async def send_weights(self, version):
        from megatron_scalerl.weights.plan import SendReport

        report = await self._ask("send", folder=str(self.folder), version=version, fault=self.fault)
        return msgspec.convert(report, SendReport)

    async def _ask(self, command, **values):
        answer = await self._process.ask({"command": command, **values})
        if answer is None:
            raise RuntimeError("the sending process ended")
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def digest_of(folder):
    """Digest of the values of a policy's file."""
    from safetensors.torch import load_file
    from weights.transfers import digest_of

    return f"{digest_of(load_file(folder / 'model.safetensors')):016x}"


def _faulty(sender, fault):
    """Stand-in faults on the wire: a flipped bit after the digest was taken, or death after the first bucket."""
    ship = sender._ship

    def faulty(shard, packed):
        if fault == "flip":
            packed[1000] ^= 1
        finish = ship(shard, packed)
        if fault == "die":
            finish()
            os._exit(1)
        return finish

    sender._ship = faulty


def _plan(weights, needs):
    """The plan of one sender that has every tensor as a whole."""
    from megatron_scalerl.weights.plan import Part, WeightPlan, manifest_of

    parts = [
        Part(number, 0, shard, ranges)
        for number in range(len(weights))
        for shard, of_shard in enumerate(needs)
        for ranges in of_shard[number]
    ]
    return WeightPlan(parameters=manifest_of(_named(weights)), senders=1, needs=needs, parts=tuple(parts))


def _named(weights):
    return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in weights.items()]


def _send(sender, plan, weights, version):
    from megatron_scalerl.weights.digest import combine
    from megatron_scalerl.weights.plan import SendReport, buckets

    tensors = list(weights.values())

    def read(number):
        part = plan.parts[number]
        return tensors[part.tensor][tuple(slice(a, b) for a, b in part.ranges)]

    digests, order = sender.send(plan, read, version), buckets(plan, next(iter(sender.groups.values())).bucket_mib)
    of_shards = tuple(
        combine(digest for digest, bucket in zip(digests, order) if bucket.shard == shard)
        for shard in range(len(plan.needs))
    )
    values = tuple(f"{sender.values[shard]:016x}" for shard in range(len(plan.needs)))
    return SendReport(
        bytes=sender.bytes,
        whole_bytes=sum(bucket.nbytes for bucket in order),
        most_sent=sender.bytes,
        most_received=sender.bytes,
        digests=of_shards,
        values=values,
    )


def main():
    import safetensors.torch
    import torch

    from megatron_scalerl.weights import plan as plans
    from megatron_scalerl.weights.plan import Connection
    from megatron_scalerl.weights.transport import make_sender

    torch.set_num_threads(1)
    sender = None
    needs = ()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            kind, value = command["command"], None
            if "folder" in command:
                weights = safetensors.torch.load_file(Path(command["folder"]) / "model.safetensors")
            if kind == "manifest":
                value = _named(weights)
            elif kind == "plan":
                needs = msgspec.convert(command["needs"], tuple[plans.Needs, ...])
                value = plans.to_json(_plan(weights, needs))
            elif kind == "connect":
                sender = make_sender(msgspec.convert(command["connection"], Connection), 0, range(len(needs)))
            else:
                _faulty(sender, command["fault"])
                value = msgspec.to_builtins(_send(sender, _plan(weights, needs), weights, command["version"]))
            answer = {"value": value}
        except (RuntimeError, ValueError) as err:
            answer = {"error": f"{type(err).__name__}: {err}"}
        print(json.dumps(answer), flush=True)
    assert "vllm" not in sys.modules


if __name__ == "__main__":
    main()

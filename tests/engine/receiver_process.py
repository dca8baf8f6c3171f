"""An engine for tests of updates: our receiver with a model of a few matrices, in a process without vLLM's server.

Run as a program it reads JSON commands from its input and answers one JSON line each. It generates nothing.
"""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

from command_process import CommandProcess, serve


class ReceiverProcess:
    """What `WeightSync` and `Membership` need of an engine's client; every call goes to the process."""

    def __init__(self, name, shapes):
        self.name = name
        self.produced_tokens = self.received_tokens = 0
        self.calls = []
        self._lock = asyncio.Lock()
        self.process = CommandProcess(__file__, json.dumps(shapes))

    async def __aenter__(self):
        await self.process.start()
        await self.ask("info")  # it has imported what it needs: the time limits of an update begin after that
        self.calls.clear()
        return self

    async def __aexit__(self, *_):
        await self.process.stop()

    def note_version(self, version):
        """It answers no generations."""

    async def post(self, path, body, query=None):
        await self.ask(path, body=body)
        return b""

    async def rpc(self, method, *arguments):
        return [await self.ask(method, body=arguments)]

    async def info(self):
        label, digest = await self.ask("info")
        return SimpleNamespace(world_size=1, weight_version=label, weight_digests=(digest,))

    async def pause(self, *, clear_cache):
        await self.ask("pause", body=True)

    async def resume(self):
        await self.ask("pause", body=False)

    def abort(self, reason):
        """It has no requests."""

    async def ask(self, command, *, body=None):
        """One command. Raises EngineError for what fails in the process, and once it has ended."""
        from megatron_scalerl.engine.answers import EngineError

        self.calls.append(command)
        async with self._lock:
            answer = await self.process.ask([command, body])
        if answer is None:
            raise EngineError(f"{self.name}: {command}: the process ended")
        if "error" in answer:
            raise EngineError(f"{self.name}: {command}: {answer['error']}")
        return answer["value"]


class Engine:
    """The process's side. vLLM's rule: no update is started beside another."""

    def __init__(self, shapes):
        import torch

        from megatron_scalerl.weights import weight_receiver

        class Model(torch.nn.Module):
            def load_weights(self, given):
                for name, weight in given:
                    getattr(self, name).data.copy_(weight)

        weight_receiver.get_world_group = lambda: SimpleNamespace(rank=0)  # type: ignore[attr-defined]
        self.model, self._module = Model(), weight_receiver
        for name, shape in shapes.items():
            self.model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.receiver = object.__new__(weight_receiver.WeightReceiver)  # without the configuration of an engine
        self.receiver.model, self.receiver.device = self.model, torch.device("cpu")
        self.receiver.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1)
        self.receiver.digest, self.receiver._groups = "", {}
        self.updating, self.label, self.paused = False, "", False

    def do(self, command, body):
        """The answer to a command."""
        if command == "msrl_weight_needs":
            return self._module.needs_of(self.model, body[0])
        if command == "msrl_live_digest":
            return self._module.live_digest(self.model)
        if command == "info":
            return [self.label, self.receiver.digest]
        if command == "paused":
            return self.paused
        self._change(command, body)
        return None

    def _change(self, command, body):
        if command == "pause":
            self.paused = body
        elif command == "msrl_abandon_update":
            self.updating = False
        elif command == "/init_weight_transfer_engine":
            self.receiver.init_transfer_engine(self._module.ConnectInfo(**body["init_info"]))
        elif command == "/start_weight_update":
            if self.updating:
                raise RuntimeError("a weight update is already active")
            self.updating = True
            self.receiver.start_weight_update()
        elif command == "/update_weights":
            self.receiver.receive_weights(self._module.UpdateInfo(**body["update_info"]))
        elif command == "/finish_weight_update":
            self.receiver.finish_weight_update()
            self.updating, self.label = False, body["weight_version"]
        else:
            assert command == "die", command
            self._die_after(body)

    def _die_after(self, parts):
        """Of the next update, write so many parts, and be killed."""
        import signal

        receive = self._module.receive

        def dying(*arguments, **more):
            for number, part in enumerate(receive(*arguments, **more)):
                if number == parts:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield part

        self._module.receive = dying  # type: ignore[assignment]


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints while it is imported
    import torch

    torch.set_num_threads(1)
    engine = Engine(json.loads(sys.argv[1]))
    serve(lambda command: engine.do(*command), answers)


if __name__ == "__main__":
    main()

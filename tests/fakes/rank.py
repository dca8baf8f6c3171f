"""A rank's end of the controller's socket, and conversations of such ranks with a real client."""

import asyncio
import contextlib

import zmq
import zmq.asyncio

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.client import TrainerClient

WHERE = FolderRendezvous(folder="/nowhere")


def client(world_size=1, rendezvous=WHERE):
    return TrainerClient(
        world_size=world_size, run_id="run", incarnation="1.0", secret="a secret", rendezvous=rendezvous
    )


class StandInRank:
    """A rank's socket that sends what a test specifies; `keys` None: those of a rank of the run."""

    def __init__(self, trainer, *, keys=None):
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        sockets.secure_client(self.socket, "a secret", sockets.Purpose.TRAINER)
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys
        self.socket.connect(trainer.endpoint)

    async def hello(self, rank, **changes):
        values = {"rank": rank, "world_size": 2, "run_id": "run", "incarnation": "1.0"} | changes
        await self.socket.send(messages.encode(messages.Hello(**values)))

    async def answer(self):
        """The next message but pings."""
        while True:
            message = messages.decode_for_rank(await asyncio.wait_for(self.socket.recv_multipart(), 120))
            if not isinstance(message, messages.Ping):
                return message

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close(linger=0)
        self._context.term()


def conversation(scenario, *, world_size=2, rendezvous=WHERE):
    """Runs `scenario(trainer, start)`, where `start` is a wait_ready under way, and closes everything."""

    async def whole():
        trainer = client(world_size, rendezvous)
        start = asyncio.create_task(trainer.wait_ready(timeout_s=240))
        try:
            return await scenario(trainer, start)
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            trainer.close()

    return asyncio.run(whole())


def ready(rank, *, dp_size=2, **changes):
    info = messages.TrainerInfo(dp_size=dp_size, parameters=1, device="cpu", backend="gloo", logits="fp32")
    return messages.Ready(**({"rank": rank, "dp_rank": rank, "holds_batch": True, "info": info} | changes))


def joined(scenario, *, world_size=2, **changes):
    """Runs `scenario(trainer, *ranks)` with ranks that have joined, and closes everything."""

    async def whole(trainer, start):
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(StandInRank(trainer)) for _ in range(world_size)]
            await join(start, *ranks, **changes)
            return await scenario(trainer, *ranks)

    return conversation(whole, world_size=world_size)


async def join(start, *ranks, **changes):
    """The ranks join and are ready; they have read everything up to here."""
    changes.setdefault("dp_size", (len(ranks),) * len(ranks))
    for number, rank in enumerate(ranks):
        await rank.hello(number, world_size=len(ranks))
        assert isinstance(await rank.answer(), messages.Welcome)
        assert isinstance(await rank.answer(), messages.Meet)
        await rank.socket.send(messages.encode(ready(number, **{k: v[number] for k, v in changes.items()})))
    await start

"""The process of a trainer rank: `python -m megatron_scalerl.trainer.worker`.

Environment: from `TrainerClient.worker_env` RANK, WORLD_SIZE, MSRL_CONTROLLER, MSRL_RUN_ID, MSRL_INCARNATION and
MSRL_SECRET; from the launcher MSRL_RECIPE (path of the resolved recipe) and, on several hosts, for rank 0
MSRL_BIND_HOST (the address of rank 0 at which the ranks meet); optionally MSRL_GREETING_TIMEOUT_S.

The life of a rank:

| state | the rank | ends with |
|---|---|---|
| greeting | sends Hello, before torch is loaded | Welcome; Refused: exits with EXIT_REFUSED |
| starting | waits for Meet, joins the process group, builds the trainer | Ready |
| serving | executes one command after another | Stop: leaves the groups, exits with 0 |

After an exception a rank sends the last line of the traceback and exits with 1. When the controller disconnects, the
rank exits with 3 at once, also in the middle of a step: no orphan holds devices.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import Rendezvous, address_of, listen_on, serve_store
from megatron_scalerl.processes.logs import log_to_stderr
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.record import record
from megatron_scalerl.trainer import messages

if TYPE_CHECKING:
    from megatron_scalerl.trainer.checkpoint import CheckpointWriting

logger = logging.getLogger("megatron_scalerl.trainer.worker")  # __name__ would be __main__ in a rank

EXIT_FAILED = 1

_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MSRL_RECIPE",
    "MSRL_CONTROLLER",
    "MSRL_RUN_ID",
    "MSRL_INCARNATION",
    "MSRL_SECRET",
)


@record
class WorkerSettings:
    """The environment of a rank."""

    recipe_path: str
    endpoint: str
    run_id: str
    incarnation: str
    secret: str
    rank: int
    world_size: int
    greeting_timeout_s: float = sockets.GREETING_S
    bind_host: str | None = None
    """Address of this host at which rank 0 binds the run's store; None: the ranks meet in a folder."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "WorkerSettings":
        """Read MSRL_*, RANK and WORLD_SIZE. Raises ValueError naming the missing variables."""
        missing_names = [name for name in _VARIABLES if not environment.get(name)]
        if missing_names:
            raise ValueError(f"environment: the launcher of this rank has not set {', '.join(missing_names)}")
        return cls(
            recipe_path=environment["MSRL_RECIPE"],
            endpoint=environment["MSRL_CONTROLLER"],
            run_id=environment["MSRL_RUN_ID"],
            incarnation=environment["MSRL_INCARNATION"],
            secret=environment["MSRL_SECRET"],
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            greeting_timeout_s=float(environment.get("MSRL_GREETING_TIMEOUT_S", sockets.GREETING_S)),
            bind_host=environment.get("MSRL_BIND_HOST"),
        )


class Worker:
    """Executes the controller's commands on a trainer."""

    _saving: CheckpointWriting | None = None
    """The checkpoint that is being written."""

    def __init__(self, recipe: Recipe, rendezvous: Rendezvous, run_dir: Path):
        # The imports stand here, so that a refused rank does not wait for torch and Megatron to load.
        from megatron_scalerl.distributed.parallel import unwrap
        from megatron_scalerl.trainer.batch_frames import BatchFrames
        from megatron_scalerl.trainer.ranks import init_parallel
        from megatron_scalerl.trainer.step import make_trainer
        from megatron_scalerl.weights.owners import manifest
        from megatron_scalerl.weights.sending import WeightSending
        from megatron_scalerl.weights.source import MegatronWeightSource

        self.recipe = recipe
        self.run_dir = run_dir
        self.parallel = init_parallel(recipe, rendezvous)
        self.trainer = make_trainer(recipe, self.parallel)
        model = unwrap(self.trainer.chunks[0])
        self.policy = manifest(model.family, recipe.policy.dtype)
        self.source = MegatronWeightSource(
            self.trainer.chunks,
            self.parallel,
            most_senders=recipe.weights.max_senders,
            family=model.adapters if recipe.adapters_alone else None,
        )
        self.sending = WeightSending(
            self.source, bucket_mib=recipe.weights.bucket_mib, change_record=self.trainer.changes.written
        )
        self._batches = BatchFrames(
            self.parallel, pad_multiple=self.trainer.pad_multiple, columns=self.trainer.columns
        )

    def info(self) -> messages.TrainerInfo:
        """The facts about the trainer that this rank's Ready message contains."""
        return messages.TrainerInfo(
            dp_size=self.parallel.dp_size,
            parameters=sum(math.prod(meta.shape) for meta in self.policy),
            device=str(self.parallel.device),
            backend={"cpu": "gloo"}.get(self.parallel.device.type, "nccl"),
            logits=self.recipe.policy.logits,
        )

    def hold(self, frames: Sequence[memoryview]) -> messages.BatchReceived:
        """Keep the batch of a Prepare until the batch's Step. Raises InvalidMessage for an invalid batch."""
        return messages.BatchReceived(rank=self.parallel.rank, step=self._batches.hold(frames))

    def run(self, command: messages.Command) -> Any:
        """Execute one command on this rank; the result on rank 0 is the answer."""
        from megatron_scalerl.trainer import checkpoint
        from megatron_scalerl.trainer.profile import profile_of

        match command:
            case messages.Step(step=step):
                batch = self._batches.take(step)
                with profile_of(step, self.recipe, self.run_dir, self.parallel.rank):
                    return self.trainer.step(batch)
            case messages.ScoreTokens(token_ids=token_ids):
                return self.trainer.token_scores(token_ids)
            case messages.DescribeWeights():
                return self.source.manifest
            case messages.PlanWeights(needs=needs):
                return self.source.plan_for(needs)
            case messages.ConnectWeights(connection=connection):
                return self.sending.connect(connection)
            case messages.SendWeights(version=version):
                return self.sending.send(version)
            case messages.Save(path=path, extra=extra, copied=copied):
                assert self._saving is None, "a Save came before the FinishSave of the last checkpoint"
                self._saving = checkpoint.begin_save(path, self.trainer, extra, copied=copied)
                return None
            case messages.FinishSave(wait=wait):
                assert self._saving is not None, "a FinishSave came without a Save"
                seconds = self._saving.finish(wait=wait)
                if seconds is not None:
                    self._saving = None
                return seconds
            case messages.Load(path=path):
                return checkpoint.load(path, self.trainer)
        raise AssertionError(f"unknown command {command}")


def greet(link: sockets.ControllerLink, settings: WorkerSettings, listening: socket.socket | None) -> None:
    """Join the run. Raises RefusedError if this rank is not accepted."""
    bound = None
    if listening is not None:
        bound = address_of(listening)
    hello = messages.Hello(
        rank=settings.rank,
        world_size=settings.world_size,
        run_id=settings.run_id,
        incarnation=settings.incarnation,
        bound=bound,
    )
    answer = link.greet(hello, settings.greeting_timeout_s)
    assert isinstance(answer, messages.Welcome), answer


def serve(link: sockets.ControllerLink, settings: WorkerSettings, listening: socket.socket | None = None) -> None:
    """Build the trainer, then execute commands until Stop.

    listening: socket at which this rank serves the run's store; None if this rank serves no store.
    """
    recipe = load_recipe(settings.recipe_path)
    from megatron_scalerl.distributed.parallel import shutdown_parallel

    meet, _ = link.receive()
    assert isinstance(meet, messages.Meet), meet
    # The store exists as long as this variable. The ranks may ask the store until they have left the groups.
    store = None
    if listening is not None:
        store = serve_store(listening)
    worker = Worker(recipe, meet.rendezvous, Path(settings.recipe_path).parent)
    parallel = worker.parallel
    link.send(
        messages.Ready(
            rank=parallel.rank, dp_rank=parallel.dp_rank, holds_batch=parallel.holds_batch, info=worker.info()
        )
    )
    while True:
        command, frames = link.receive()
        if isinstance(command, messages.Prepare):
            link.send(worker.hold(frames))
            continue
        assert not isinstance(command, messages.Welcome | messages.Meet), command
        value = None
        if isinstance(command, messages.Stop):
            # The groups end before the store, because the end of a group is collective and needs the store. The
            # answer comes last.
            shutdown_parallel()
            del store
            link.leave()
        else:
            value = worker.run(command)
        # Rank 0 answers for all ranks.
        if settings.rank != 0:
            value = None
        answer = msgspec.Raw(messages.encode(value))
        link.send(messages.Done(call=command.call, rank=settings.rank, value=answer))
        if isinstance(command, messages.Stop):
            return


def main() -> int:
    """Run one rank. Returns the exit status of a refused rank; the process of any other rank ends here."""
    log_to_stderr()
    settings = WorkerSettings.from_environment(os.environ)
    # Child processes do not need the secret.
    del os.environ["MSRL_SECRET"]
    listening = None
    if settings.bind_host and settings.rank == 0:
        listening = listen_on(settings.bind_host)
    link = sockets.ControllerLink(
        settings.endpoint, settings.secret, sockets.Purpose.TRAINER, messages.decode_for_rank
    )
    try:
        greet(link, settings, listening)
    except sockets.RefusedError as error:
        logger.error("%s", error)
        link.abandon()
        return sockets.EXIT_REFUSED
    try:
        serve(link, settings, listening)
    except BaseException as error:
        line = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        full = ""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # A full disk is logged in one line, because a traceback would not help the user.
            full = str(error.filename or "")
            logger.error("%s", line)
        else:
            logger.exception("this rank has failed and exits")
        link.send(messages.Failed(rank=settings.rank, error=line, full=full))
        link.exit(EXIT_FAILED)
    link.exit(0)


if __name__ == "__main__":
    sys.exit(main())

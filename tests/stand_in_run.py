"""A whole controller in virtual time: real folder, journal, ledger, stream; stand-in trainer and engines.

Nothing computes and nothing sleeps: the event loop's clock jumps to the next timer. So a run of minutes takes
milliseconds, its timing is reproducible, and it can be killed at any moment or at any write.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import selectors
import shutil
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rollout_groups import scored

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import read_commit, write_commit
from megatron_scalerl.controller.collector import RunCollector
from megatron_scalerl.controller.evaluations import EvaluationInputs
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.loop import Controller
from megatron_scalerl.controller.meter import Meter, metering
from megatron_scalerl.controller.metrics import Sink
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import RunFolder, check_history, resume_point
from megatron_scalerl.controller.weight_sync import WeightUpdate
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.launch.placement import Devices, Fleet
from megatron_scalerl.processes.signals import SaveAndExit
from megatron_scalerl.prompts.dataset import PromptSet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.trainer.messages import TrainerInfo
from megatron_scalerl.types import CompletionLost, Prompt, Rollout, Score, StepReport

TRAIN_S, PUBLISH_S, VALIDATE_S, SAVE_S, START_S = 2.0, 0.25, 3.0, 0.5, 7.0


class Killed(BaseException):
    """The controller was killed: no code of it runs any more, not even cleanup."""


class StandInExecutor(ThreadPoolExecutor):
    """Runs work at once, in the thread of the event loop: a jumping clock would not wait for another thread."""

    def submit(self, work, /, *arguments, **options):
        done = Future()
        try:
            done.set_result(work(*arguments, **options))
        except BaseException as failure:
            done.set_exception(failure)
        return done


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it.

    What the journal does in threads of the default executor takes no virtual time.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))
        self.set_default_executor(StandInExecutor())

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        assert timeout is not None, "every task waits and no timer is set: a deadlock"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def in_virtual_time(main):
    """What the coroutine returns, in a loop of its own."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


class StandInDraw(NamedTuple):
    """Seed, group and index."""

    seed: int
    group: int
    index: int

    @property
    def thinking_cut(self):
        """No interruption."""
        return 0

    def __str__(self):
        return str(tuple(self))


class StandInEngine:
    """Serves the version that it was set to."""

    secret = "none"

    produced_tokens = received_tokens = in_flight = 0

    def __init__(self, number: int = 0) -> None:
        self.version, self.name = 0, f"engine-{number}"

    aborted = ""

    def abort(self, reason):
        """Requests in flight end with it."""
        self.aborted = reason


class StandInSampler:
    """A completion takes 1 to 6 s, drawn from its group and index; every second one is correct.

    flat_groups: groups whose completions are all correct. lost: (seed, group, index) of lost completions, and how
    often they are lost.
    """

    def __init__(self, flat_groups: Container[int], lost: dict[tuple[int, int, int], int]) -> None:
        self._flat, self._lost = flat_groups, lost

    def draw(self, seed, group_id, index):
        return StandInDraw(seed, group_id, index)

    async def complete(self, engine, prompt, draw, *, priority, max_tokens=None):
        version = engine.version
        seconds = VALIDATE_S if priority == 0 else 1 + 5 * random.Random(str(draw)).random() ** 2
        await asyncio.sleep(seconds)
        if reason := getattr(engine, "aborted", ""):
            raise EngineError(f"{engine.name}: {reason}")
        engine.received_tokens += 10
        rollout = Rollout(
            token_ids=(5,) * 10,
            rollout_logprobs=(-0.5,) * 9 + (0.0,),
            policy_versions=(version,) * 9 + (engine.version,),
            loss_mask=(True,) * 9 + (False,),
            interrupted=False,
            truncated=False,
            thinking_cut=draw[1],
            seed=draw[2],
        )
        if self._lost.get(draw, 0) > 0:
            self._lost[draw] -= 1
            raise CompletionLost(f"completion {draw}: no log-probabilities", reason="no_logprobs")
        correct = draw[2] % 2 == 0 or draw[1] in self._flat
        score = Score(correct=correct, reward=1.0 if correct else -1.0)
        return scored(rollout, score)


class StandInTrainer:
    """Counts steps. Batches come before a step or beside it, and not beside a weight update or a checkpoint."""

    def __init__(self, send_s: float = 0.0) -> None:
        """send_s: for sending a batch."""
        self.version = self.prepared = 0
        self.trained: list[int] = []
        self.sent_ahead: list[int] = []
        """Steps whose batch was sent, or begun to be, while the trainer made the step before."""
        self.stepping = self.sending = False
        self.writing = None
        self.send_s = send_s
        self.completions: dict[int, set[tuple[int, int]]] = {}
        """(group, index) of what each step was sent, read from its bytes."""

    async def prepare(self, plan, read):
        assert [part.policy_version for part in plan.ranks] == [plan.step - 1]
        assert not self.sending and self.prepared == self.version + self.stepping, "one batch at a time"
        if self.stepping:
            self.sent_ahead.append(plan.step)
        self.sending = True
        sent = [rollout_bytes.read(data) for numbers in plan.numbers for data in await read(numbers)]
        assert [len(each.token_ids) for each in sent] == [s.tokens for part in plan.ranks for s in part.samples]
        await asyncio.sleep(self.send_s)
        self.completions[plan.step] = {(each.thinking_cut, each.seed) for each in sent}
        self.prepared = plan.step
        self.sending = False

    async def step(self, step):
        assert step == self.prepared and not self.sending
        self.stepping = True
        await asyncio.sleep(TRAIN_S)
        self.stepping, self.version = False, step
        self.trained.append(self.version)
        return StepReport(
            step=self.version,
            policy_version=self.version,
            loss=0.5,
            grad_norm=1.0,
            learning_rate=1.0,
            tokens=1,
            seconds=TRAIN_S,
            metrics={"mismatch_mean": 0.0, "entropy": 0.1},
        )

    async def load(self, path):
        state = json.loads((Path(path) / "controller.json").read_text())
        self.version = self.prepared = state["step"]
        return state

    async def save(self, path, extra, *, asynchronous=False):
        assert not self.sending and self.writing is None
        folder = Path(path)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.writing = (folder, extra, asyncio.get_running_loop().time() + SAVE_S)
        if not asynchronous:
            assert await self.finish_save(wait=True) is not None

    async def finish_save(self, *, wait):
        folder, extra, end = self.writing
        left = end - asyncio.get_running_loop().time()
        if left > 0 and not wait:
            return None
        await asyncio.sleep(max(left, 0))
        write_durably(folder / "controller.json", json.dumps(extra).encode())
        write_commit(folder, {"step": extra["step"]})
        self.writing = None
        return SAVE_S


class StandInSync:
    """Sets the engines' version after a delay."""

    def __init__(self, engines, trainer, *, stores=False) -> None:
        """stores: with a store of weights."""
        self._engines, self._trainer, self._stores = engines, trainer, stores

    def trained(self, report):
        assert report.policy_version > 0

    async def publish(self, version):
        assert not self._trainer.sending
        return await self._update(version, self._engines.alive)

    async def catch_up(self, version):
        return await self._update(version, self._engines.stale)

    def stored_for(self):
        return self._engines.stale if self._stores else []

    async def catch_up_from_store(self, version):
        assert self._trainer.stepping and version <= self._trainer.version
        await self._update(version, self._engines.stale)

    async def _update(self, version, engines):
        await asyncio.sleep(PUBLISH_S)
        for engine in engines:
            engine.version = version
            self._engines.serve(engine, version)
        return WeightUpdate(
            version=version,
            seconds_paused=0.0,
            seconds_total=PUBLISH_S,
            seconds_sending=PUBLISH_S,
            phases={"update": PUBLISH_S},
            bytes=1,
            whole_bytes=1,
            most_sent=1,
            most_received=1,
            digest=f"weights-{version}",
        )


class StandInProbe:
    """Finds no mismatch."""

    async def check(self, version, *, new_only=False):
        return {}


@dataclass
class Outcome:
    """The result of an attempt."""

    reason: str | None
    """Why it ended; None if it was killed."""
    seconds: float
    """Virtual seconds from start to end."""
    trained: list[int]
    completions: dict[int, set[tuple[int, int]]]
    """Step -> (group, index) of every completion that the trainer was sent for it."""
    sent_ahead: list[int]
    """Steps whose batch was sent, or begun to be, while the trainer made the step before."""
    killed_in: str
    """Name of the file that it was writing when it was killed."""


def recipe(folder, **changes) -> Recipe:
    """Six steps of two groups of four completions, k = 2, validation every second step, a checkpoint every third."""
    data = {
        "name": "r",
        "output_dir": str(folder),
        "steps": 6,
        "policy": {"path": "p"},
        "prompts": {"path": "q"},
        "rollouts": {"groups_per_batch": 2, "group_size": 4, "max_staleness_steps": 2, "max_in_flight": 64},
        "trainer": {"micro_batch_tokens": 64},
        "validation": {"every_steps": 2, "generations": 2},
        "checkpoint": {"every_steps": 3, "keep": 2},
        "weights": {"probe_every": 0},
    }
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return Recipe.model_validate(data)


def prompts() -> PromptSet:
    """Forty training prompts, four held out."""
    made = [Prompt(prompt_id=f"p{i:02d}", text=str(i), answer="0", token_ids=(1, 2)) for i in range(44)]
    return PromptSet(training=tuple(made[:40]), held_out=tuple(made[40:]), report=None)


def attempt(
    settings: Recipe,
    *,
    kill_at_s: float | None = None,
    kill_at_write: int | None = None,
    save_at_s: float | None = None,
    power_loss: bool = False,
    flat_groups: Container[int] = (),
    lost: dict[tuple[int, int, int], int] | None = None,
    send_s: float = 0.0,
    changes: Sequence[tuple[float, Callable[[Membership], None]]] = (),
    collector: RunCollector | None = None,
    sinks: Sequence[Sink] = (),
    evaluation: EvaluationInputs | None = None,
) -> Outcome:
    """One attempt, to its end or until it is killed at a moment or in a write, or asked to save and exit.

    send_s: for sending a batch to the trainer. changes: what happens to the engines, and when.
    collector: gets what a Prometheus endpoint would show. sinks: more sinks of the records.
    power_loss: truncate every file to its last synced length.
    """
    loop = VirtualTimeLoop()
    trainer, sampler = StandInTrainer(send_s), StandInSampler(flat_groups, lost or {})
    killer = _Killer(loop, kill_at_s, kill_at_write)
    write, os.write = os.write, killer.guard(os.write)
    disk = _Disk(Path(settings.run_dir))
    fsync, os.fsync = os.fsync, disk.fsync
    folder, saving = None, SaveAndExit()
    if save_at_s is not None:
        loop.call_at(save_at_s, saving.request)
    try:
        folder = RunFolder(settings)
        reason = loop.run_until_complete(
            _attempt(loop, settings, folder, trainer, sampler, saving, changes, collector, sinks, evaluation)
        )
    except (Killed, RuntimeError, asyncio.CancelledError):
        if not killer.dead and not saving.requested:
            raise
        reason = None
    finally:
        killer.dead = True  # tasks that still run during the teardown of the loop write nothing
        seconds = loop.now
        loop.run_until_complete(_cancel_all())
        loop.close()
        os.write, os.fsync = write, fsync
        if folder is not None:
            folder.close()
    if power_loss:
        disk.cut(Path(settings.run_dir))
    return Outcome(
        reason=reason,
        seconds=seconds,
        trained=trainer.trained,
        completions=trainer.completions,
        sent_ahead=trainer.sent_ahead,
        killed_in=killer.killed_in,
    )


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Disk:
    """Keeps the synced length of each file; what was there before counts as synced."""

    def __init__(self, folder: Path) -> None:
        files = (path.stat() for path in folder.rglob("*")) if folder.exists() else ()
        self._sizes = {status.st_ino: status.st_size for status in files}

    def fsync(self, handle) -> None:
        status = os.fstat(handle)
        self._sizes[status.st_ino] = status.st_size

    def cut(self, folder: Path) -> None:
        """Truncate files to their synced length, except checkpoints and TensorBoard's files."""
        for path in [*folder.glob("*.jsonl"), *folder.glob("rollouts/*")]:
            size = self._sizes.get(path.stat().st_ino, 0)
            if size < path.stat().st_size:
                os.truncate(path, size)


class _Killer:
    """Stops the loop at a moment or in the middle of the n-th write; nothing is written afterwards."""

    def __init__(self, loop, at_s, at_write) -> None:
        self.dead = False
        self.writes = 0
        self.killed_in = ""
        self._loop, self._at_write = loop, at_write
        if at_s is not None:
            loop.call_at(at_s, self._stop)

    def _stop(self) -> None:
        self.dead = True
        self._loop.stop()

    def guard(self, write):
        """os.write, for every file of the run: events, blocks, recipe, COMMIT."""

        def guarded(handle, data):
            if self.dead:
                raise Killed
            if self.writes == self._at_write:
                self.killed_in = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
                write(handle, data[: self.writes % (len(data) + 1)])
                self._stop()
                raise Killed
            self.writes += 1
            return write(handle, data)

        return guarded


async def _attempt(loop, settings, folder, trainer, sampler, saving, changes, collector, sinks, evaluation) -> str:
    engines = Membership.of([StandInEngine(i) for i in range(settings.engine.count)], version=None)
    for at_s, change in changes:
        loop.call_at(at_s, change, engines)
    start, history = resume_point(folder.path, read_commit), read_history(folder.path)
    check_history(folder.path, history, start)
    devices = Devices(unit="device_hours", trainer=1, engine=2)
    ledger = Ledger(folder.path / "ledger.jsonl", devices.unit, incarnation=folder.attempt.incarnation)
    meter = Meter(ledger, devices, start, clock=loop.time)
    if collector is not None:
        collector.members = lambda: engines.members
        collector.attempt(start.step, ledger.seconds)
    info = TrainerInfo(
        world_size=1,
        dp_size=1,
        parameters=1,
        vocab_size=8,
        device="cpu",
        backend="gloo",
        dtype="float32",
        logits="fp32",
    )
    async with metering(meter):
        await asyncio.sleep(START_S)
        controller = Controller(
            recipe=settings,
            prompts=prompts(),
            folder=folder,
            fleet=Fleet(trainer=trainer, info=info, engines=engines, devices=devices),
            start=start,
            history=history,
            sampler=sampler,
            sync=StandInSync(engines, trainer, stores=bool(settings.weights.store)),
            probe=StandInProbe(),
            meter=meter,
            progress=Progress(Console(file=open("/dev/null", "w")), settings.steps),  # noqa: SIM115
            saving=saving,
            evaluation=evaluation,
            sinks=[*sinks, *([] if collector is None else [collector])],
        )
        return await controller.run()

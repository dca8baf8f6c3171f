"""A whole controller in virtual time: real folder, journal, ledger, stream; stand-in trainer and engines.

Nothing computes and nothing sleeps: the event loop's clock jumps to the next timer. So a run of minutes takes
milliseconds, its timing is reproducible, and it can be killed at any moment or at any write.
"""

import asyncio
import contextlib
import gc
import io
import os
import random
from pathlib import Path
from types import SimpleNamespace

from fakes.clock import VirtualTimeLoop
from fakes.engine import StandInEngine
from fakes.sampler import StandInSampler
from fakes.sync import StandInProbe, StandInSync
from fakes.trainer import INFO, StandInTrainer
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.loop import Controller
from megatron_scalerl.controller.meter import Meter, metering
from megatron_scalerl.controller.progress import Progress
from megatron_scalerl.controller.run_folder import Resumed, RunFolder, check_history, resume_point
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.launch.placement import Devices, Fleet
from megatron_scalerl.processes.signals import SaveAndExit
from megatron_scalerl.prompts.dataset import PromptSet
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.types import CompletionLost, Prompt

PUBLISH_S, VALIDATE_S, START_S = 0.25, 3.0, 7.0


class Killed(BaseException):
    """The controller was killed: no code of it runs any more, not even cleanup."""


def in_virtual_time(main):
    """What the coroutine returns, in a loop of its own."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def run_sampler(flat_groups, lost, *, answers=True):
    """A completion takes 1 to 6 s, drawn from its group and index; every second one is correct.

    flat_groups: groups whose completions are all correct. lost: (seed, group, index) of lost completions, and how
    often they are lost. answers: else every completion ends while it thinks.
    """

    async def wait(engine, draw, priority):
        await asyncio.sleep(VALIDATE_S if priority == 0 else 1 + 5 * random.Random(str(draw)).random() ** 2)
        if engine.aborted:
            raise EngineError(f"{engine.name}: {engine.aborted}")
        engine.received_tokens += 10
        if lost.get(draw, 0) > 0:
            lost[draw] -= 1
            raise CompletionLost(f"completion {draw}: no log-probabilities", reason="no_logprobs")

    return StandInSampler(
        wait,
        correct=lambda draw: answers and (draw.index % 2 == 0 or draw.group in flat_groups),
        tokens=lambda draw: (5,) * 10,
        logprobs=lambda draw, size: (-0.5,) * (size - 1) + (0.0,),
        mask=(True,) * 9 + (not answers,),
        reason="" if answers else "no_answer",
    )


def recipe(folder, **changes):
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


def prompts():
    """Forty training prompts, four held out."""
    made = [Prompt(prompt_id=f"p{i:02d}", text=str(i), answer="0", token_ids=(1, 2)) for i in range(44)]
    return PromptSet(training=tuple(made[:40]), held_out=tuple(made[40:]), reports=())


def attempt(
    settings,
    *,
    kill_at_s=None,
    kill_at_write=None,
    save_at_s=None,
    power_loss=False,
    flat_groups=(),
    lost=None,
    send_s=0.0,
    changes=(),
    collector=None,
    sinks=(),
    evaluation=None,
    answers=True,
):
    """One attempt, to its end or until it is killed at a moment or in a write, or asked to save and exit.

    send_s: for sending a batch to the trainer. changes: what happens to the engines, and when.
    collector: gets what a Prometheus endpoint would show. sinks: more sinks of the records.
    power_loss: truncate every file to its last synced length.

    The result has the `reason` of its end, None if it was killed; its virtual `seconds`; the steps `trained`; of each
    step the `completions` that the trainer was sent, as (group, index); the steps `sent_ahead`, whose batch was sent,
    or begun to be, while the trainer made the step before; the file that it was writing when it was `killed_in`.
    """
    if not gc.get_freeze_count():
        gc.freeze()  # the controller's own collections would go through all that the tests have imported
    loop = VirtualTimeLoop()
    trainer, sampler = StandInTrainer(send_s=send_s), run_sampler(flat_groups, lost or {}, answers=answers)
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
    return SimpleNamespace(
        reason=reason,
        seconds=seconds,
        trained=trainer.trained,
        completions=trainer.completions,
        sent_ahead=trainer.sent_ahead,
        killed_in=killer.killed_in,
    )


async def _cancel_all():
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Disk:
    """Keeps the synced length of each file; what was there before counts as synced."""

    def __init__(self, folder):
        files = (path.stat() for path in folder.rglob("*")) if folder.exists() else ()
        self._sizes = {status.st_ino: status.st_size for status in files}

    def fsync(self, handle):
        status = os.fstat(handle)
        self._sizes[status.st_ino] = status.st_size

    def cut(self, folder):
        """Truncate files to their synced length, except checkpoints and TensorBoard's files."""
        for path in [*folder.glob("*.jsonl"), *folder.glob("rollouts/*")]:
            size = self._sizes.get(path.stat().st_ino, 0)
            if size < path.stat().st_size:
                os.truncate(path, size)


class _Killer:
    """Stops the loop at a moment or in the middle of the n-th write; nothing is written afterwards."""

    def __init__(self, loop, at_s, at_write):
        self.dead = False
        self.writes = 0
        self.killed_in = ""
        self._loop, self._at_write = loop, at_write
        if at_s is not None:
            loop.call_at(at_s, self._stop)

    def _stop(self):
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


async def _attempt(loop, settings, folder, trainer, sampler, saving, changes, collector, sinks, evaluation):
    engines = Membership.of([StandInEngine(f"engine-{i}") for i in range(settings.engine.count)], version=None)
    for at_s, change in changes:
        loop.call_at(at_s, change, engines)
    start, history = resume_point(folder.path), read_history(folder.path)
    check_history(folder.path, history, start)
    devices = Devices(unit="device_hours", trainer=1, engine=2)
    ledger = Ledger(folder.path / "ledger.jsonl", devices.unit, incarnation=folder.attempt.incarnation)
    meter = Meter(ledger, devices, start, clock=loop.time)
    if collector is not None:
        collector.members = lambda: engines.members
        collector.attempt(start.step, ledger.seconds)
    async with contextlib.AsyncExitStack() as ending:
        ending.callback(ledger.close)
        await ending.enter_async_context(metering(meter))
        await asyncio.sleep(START_S)
        controller = Controller(
            recipe=settings,
            prompts=prompts(),
            folder=folder,
            fleet=Fleet(trainer=trainer, info=INFO, engines=engines, devices=devices),
            resumed=Resumed(start, history),
            sampler=sampler,
            sync=StandInSync(engines, trainer, seconds=PUBLISH_S),
            probe=StandInProbe(),
            meter=meter,
            progress=Progress(Console(file=io.StringIO()), settings.steps),
            saving=saving,
            evaluation=evaluation,
            sinks=[*sinks, *([] if collector is None else [collector])],
        )
        return await controller.run()


def check_records(folder):
    """Each step, batch and validation is recorded once, no group trained twice; TensorBoard equals the records."""
    records = read_jsonl(folder / "metrics.jsonl")
    assert [r["step"] for r in records] == [r["batches"] for r in records] == [1, 2, 3, 4, 5, 6]
    validations = [r["step"] for r in read_jsonl(folder / "validation.jsonl")]
    assert validations == [0, 2, 4, 6]
    assert [r["step"] for r in read_jsonl(folder / "validation_by_prompt.jsonl")] == validations
    batches = read_history(folder).batches
    groups = [g for b in batches for g in b.group_ids]
    assert [b.batch for b in batches] == [0, 1, 2, 3, 4, 5] and len(set(groups)) == len(groups)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [r["step"] for r in records]
    assert [e.step for e in events.Scalars("validation/pass_rate")] == validations

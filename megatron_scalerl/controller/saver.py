"""Checkpoints of a run. The life of one:

    save          records, ledger and journal are synced; the trainer's ranks write, or copy their state to write it
    commit        with checkpoint.async_save: between two later steps, once all ranks have written
    _committed    older checkpoints and rollouts that no resume needs are deleted

A checkpoint holds the trainer's state and the controller's (step, batches, length of the journal), which the
trainer's rank 0 writes with it. Batches before it are never replayed, so the controller's records of them are on the
disk before it is committed.

With checkpoint.async_save the trainer stops only while its ranks copy their state; they write during the next steps.
`commit`, between two steps, completes the checkpoint once all have written. A run that fails before resumes from the
one before it. One checkpoint is written at a time: the next one waits.
"""

from dataclasses import dataclass

import msgspec

from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.metrics import Metrics
from megatron_scalerl.controller.run_folder import RECORDS, ControllerState, RunFolder, rows_of
from megatron_scalerl.processes.garbage import release_memory
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.journal import Journal
from megatron_scalerl.trainer.client import TrainerClient


@dataclass(kw_only=True, slots=True)
class _StartedSave:
    """A checkpoint whose state the ranks have copied."""

    step: int
    copy_seconds: float
    stopped_seconds: float
    """Seconds that the trainer has waited for the checkpoint so far."""


class Saver:
    """Writes the checkpoints of one attempt. Raises as `TrainerClient` does."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        trainer: TrainerClient,
        records: tuple[Meter, Metrics, Journal],
        *,
        step: int,
    ):
        """records: synced before a checkpoint is written. step: of the checkpoint that the run resumes from."""
        self._section = recipe.checkpoint
        self._folder = folder
        self._trainer = trainer
        self._meter, self._metrics, self._journal = records
        self.step = step
        """Step of the newest checkpoint that is committed."""
        self._begun: _StartedSave | None = None
        """The checkpoint that is being written."""

    async def save(self, step: int, batches: int, *, last: bool = False) -> None:
        """Write and commit a checkpoint, or begin to with checkpoint.async_save. Not while the trainer steps.

        last: it is not copied, since no step is made while it is written.
        """
        await self.commit(wait=True)
        begin = self._meter.elapsed
        # counted before the syncs, which find a record that was replaced: no count is of a file that is not synced
        rows = {name: rows_of(self._folder.path / name) for name in RECORDS}
        self._meter.ledger.sync()
        self._metrics.sync()
        state = ControllerState(
            step=step,
            batches=batches,
            run_id=self._folder.attempt.run_id,
            position=await self._journal.position(),
            record_rows=rows,
        )
        asynchronous = self._section.async_save and not last
        path = str(self._folder.checkpoint(step))
        await self._trainer.save(path, msgspec.to_builtins(state), asynchronous=asynchronous)
        seconds = self._meter.elapsed - begin
        if asynchronous:
            self._begun = _StartedSave(step=step, copy_seconds=seconds, stopped_seconds=seconds)
        else:
            await self._committed(step, seconds=seconds, stopped_seconds=seconds)

    async def commit(self, *, wait: bool) -> None:
        """Commit the checkpoint that was begun, if there is one. wait: for its ranks, if they still write it."""
        begun = self._begun
        if begun is None:
            return
        begin = self._meter.elapsed
        written_seconds = await self._trainer.finish_save(wait=wait)
        waited = self._meter.elapsed - begin
        begun.stopped_seconds += waited
        if written_seconds is None:
            return
        self._begun = None
        total = begun.copy_seconds + max(written_seconds, waited)
        await self._committed(begun.step, seconds=total, stopped_seconds=begun.stopped_seconds)

    async def maybe(self, step: int, batches: int) -> None:
        """Between two steps: save if a checkpoint is due, else commit the one that was begun, if it is written."""
        interval = self._section.every_steps
        if interval and step % interval == 0 and step > self._newest:
            await self.save(step, batches)
        else:
            await self.commit(wait=False)

    @property
    def _newest(self) -> int:
        return self.step if self._begun is None else self._begun.step

    async def save_last(self, step: int, batches: int) -> None:
        """Commit everything up to `step`; nothing is written afterwards."""
        if step > self._newest:
            await self.save(step, batches, last=True)
        await self.commit(wait=True)

    async def _committed(self, step: int, *, seconds: float, stopped_seconds: float) -> None:
        """Note a committed checkpoint, and delete the older files that it makes unnecessary."""
        self.step = step
        self._folder.saved(step, seconds=seconds, stopped_seconds=stopped_seconds)
        self._folder.keep_checkpoints(self._section.keep, newest=step)
        # the checkpoints first: what the kept ones include decides which rollouts are needed
        await self._journal.retain(self._folder.kept_batches(self._section.keep))
        release_memory()

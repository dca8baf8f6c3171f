"""Checkpoints of a run. The life of a checkpoint:

    save          records, ledger and journal are synced; the trainer's ranks write the state, or only copy it
    commit        with checkpoint.async_save: between two later steps, once all ranks have written
    _committed    older checkpoints and rollouts that no resume needs are deleted

A checkpoint holds the trainer's state and the controller's state (step, batches, length of the journal); the
trainer's rank 0 writes both. Earlier batches are never replayed, so the controller's records of earlier batches are
on the disk before the checkpoint is committed.

With checkpoint.async_save the trainer stops only while the ranks copy the state; the ranks write during the next
steps. `commit`, between two steps, completes the checkpoint once all ranks have written. A run that fails earlier
resumes from the previous checkpoint. One checkpoint is written at a time: the next checkpoint waits.
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
        """records: synced before a checkpoint is written. step: step of the checkpoint to resume from."""
        self._section = recipe.checkpoint
        self._folder = folder
        self._trainer = trainer
        self._meter, self._metrics, self._journal = records
        self.step = step
        """Step of the newest checkpoint that is committed."""
        self._started_save: _StartedSave | None = None
        """The checkpoint that is being written."""

    async def save(self, step: int, batches: int, *, last: bool = False) -> None:
        """Write and commit a checkpoint; with checkpoint.async_save, only start to write. Not called during a step.

        last: the state is not copied, since no step follows.
        """
        await self.commit(wait=True)
        begin = self._meter.elapsed
        # Rows are counted before the syncs. The syncs detect a replaced file, so every count is of a synced file.
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
            self._started_save = _StartedSave(step=step, copy_seconds=seconds, stopped_seconds=seconds)
        else:
            await self._committed(step, seconds=seconds, stopped_seconds=seconds)

    async def commit(self, *, wait: bool) -> None:
        """Commit the checkpoint in progress, if any. wait: wait for ranks that still write."""
        started_save = self._started_save
        if started_save is None:
            return
        begin = self._meter.elapsed
        written_seconds = await self._trainer.finish_save(wait=wait)
        waited = self._meter.elapsed - begin
        started_save.stopped_seconds += waited
        if written_seconds is None:
            return
        self._started_save = None
        total = started_save.copy_seconds + max(written_seconds, waited)
        await self._committed(started_save.step, seconds=total, stopped_seconds=started_save.stopped_seconds)

    async def maybe(self, step: int, batches: int) -> None:
        """Between two steps: save if a checkpoint is due, else commit the checkpoint that the ranks have written."""
        interval = self._section.every_steps
        if interval and step % interval == 0 and step > self._newest:
            await self.save(step, batches)
        else:
            await self.commit(wait=False)

    @property
    def _newest(self) -> int:
        return self.step if self._started_save is None else self._started_save.step

    async def save_last(self, step: int, batches: int) -> None:
        """Save and commit a checkpoint of `step`, unless there is one, and wait for ranks that still write."""
        if step > self._newest:
            await self.save(step, batches, last=True)
        await self.commit(wait=True)

    async def _committed(self, step: int, *, seconds: float, stopped_seconds: float) -> None:
        """Note a committed checkpoint, and delete older files that no resume needs."""
        self.step = step
        self._folder.saved(step, seconds=seconds, stopped_seconds=stopped_seconds)
        self._folder.keep_checkpoints(self._section.keep, newest=step)
        # Checkpoints are deleted first, because the batches in the kept checkpoints decide which rollouts are needed.
        await self._journal.retain(self._folder.kept_batches(self._section.keep))
        release_memory()

"""Checkpoints of a run. The life of a checkpoint:

    save          records, ledger and journal are synced to disk; the trainer's ranks write, or only copy, the state
    commit        with checkpoint.async_save, between later steps: completes a checkpoint that all ranks have written
    _committed    deletes older checkpoints and rollouts that no resume needs

A checkpoint holds the trainer's state and the controller's state (step, batches, length of the journal); the
trainer's rank 0 writes both. A resume trains no batch before the checkpoint again. So the controller's records of
these batches must be on disk before the checkpoint is committed.

With checkpoint.async_save the trainer stops only while the ranks copy the state; the ranks write during the next
steps. A run that fails before the commit resumes from the previous checkpoint. One checkpoint is written at a time:
`save` waits for the checkpoint in progress.
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
    """A checkpoint with checkpoint.async_save, from the copy of the state to the commit."""

    step: int
    copy_seconds: float
    stopped_seconds: float
    """Seconds that the trainer has waited for the checkpoint so far."""


class Saver:
    """Writes the checkpoints of one attempt. The methods raise the errors of `TrainerClient`."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        trainer: TrainerClient,
        records: tuple[Meter, Metrics, Journal],
        *,
        step: int,
    ):
        """records: write ledger, metrics and journal, which `save` syncs to disk before a checkpoint. step: step of
        the checkpoint to resume from."""
        self._section = recipe.checkpoint
        self._folder = folder
        self._trainer = trainer
        self._meter, self._metrics, self._journal = records
        self.step = step
        """Step of the newest checkpoint that is committed."""
        self._started_save: _StartedSave | None = None
        """The checkpoint that the ranks still write; None if there is no such checkpoint."""

    async def save(self, step: int, batches: int, *, last: bool = False) -> None:
        """Write and commit a checkpoint; with checkpoint.async_save, only start to write.

        The caller must not call this during a step. last: True if no step follows; the ranks then write and commit at
        once, even with checkpoint.async_save.
        """
        await self.commit(wait=True)
        begin = self._meter.elapsed
        # The syncs detect a replaced file. Rows are counted before the syncs, so every count is of a synced file.
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
        """Commit the checkpoint in progress, if any. wait: False to return if a rank still writes."""
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
        """Save if a checkpoint is due after `step`; else commit the checkpoint in progress if completely written."""
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
        """Record a committed checkpoint, and delete older checkpoints and rollouts that no resume needs."""
        self.step = step
        self._folder.saved(step, seconds=seconds, stopped_seconds=stopped_seconds)
        self._folder.keep_checkpoints(self._section.keep, newest=step)
        # Checkpoints are deleted before rollouts, because the kept checkpoints decide which rollouts a resume needs.
        await self._journal.retain(self._folder.kept_batches(self._section.keep))
        release_memory()

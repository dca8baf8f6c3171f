"""The stand-in trainer rank of the benchmarks: the real protocol, and no training.

python tools/stand_in_trainer.py SECONDS [DP_SIZE]        (of a step; the environment of a rank)

With DP_SIZE it builds its batches as a trainer's rank does, and answers a step with the seconds that this took.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from checkout import explained

with explained():
    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.trainer import messages, worker
    from megatron_scalerl.types import StepReport

INFO = messages.TrainerInfo(
    world_size=1,
    dp_size=1,
    parameters=1,
    vocab_size=128_256,
    device="stand-in",
    backend="gloo",
    dtype="bfloat16",
    logits="fp32",
)

STEP_SECONDS = float(sys.argv[1]) if __name__ == "__main__" else 0.0
DP_SIZE = int(sys.argv[2]) if __name__ == "__main__" and len(sys.argv) > 2 else None


class StandInWorker:
    """Reports steps that it did not make."""

    def __init__(self, recipe: Recipe, rendezvous: Any) -> None:
        rank, dp_size, alone = int(os.environ["RANK"]), DP_SIZE or 1, SimpleNamespace(size=lambda: 1)
        self.parallel = SimpleNamespace(rank=rank, dp_rank=rank % dp_size, holds_batch=rank < dp_size)
        self.parallel.groups = SimpleNamespace(mp=alone, cp=alone)
        self._tokens, self._batches = 0, None
        if DP_SIZE:
            from megatron_scalerl.trainer.batch_frames import BatchFrames

            tokens = recipe.micro_batch_tokens
            trainer = SimpleNamespace(micro_batch_tokens=tokens, experts=None, pad_multiple=1)
            self._batches = BatchFrames(trainer, self.parallel)

    def info(self) -> messages.TrainerInfo:
        """Facts about no trainer."""
        return replace(INFO, world_size=int(os.environ["WORLD_SIZE"]), dp_size=DP_SIZE or 1)

    def hold(self, frames: Sequence[memoryview]) -> messages.Held:
        """Take a batch."""
        self._tokens = sum(frame.nbytes for frame in frames[1:]) // 8
        if self._batches is not None:
            return messages.Held(rank=self.parallel.rank, step=self._batches.hold(frames))
        batch = messages.decode_for_rank(frames)
        assert isinstance(batch, messages.Prepare), batch
        return messages.Held(rank=0, step=batch.plan.step)

    def run(self, command: Any) -> Any:
        """The report of a step."""
        assert isinstance(command, messages.Step), command
        begin = time.perf_counter()
        time.sleep(STEP_SECONDS)
        if self._batches is not None and self.parallel.holds_batch:
            self._batches.take(command.step)
        return StepReport(
            step=command.step,
            policy_version=command.step,
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            tokens=self._tokens,
            seconds=time.perf_counter() - begin,
            metrics={"mismatch_mean": 0.0, "entropy": 0.0},
        )


if __name__ == "__main__":
    worker.Worker = StandInWorker  # type: ignore[assignment, misc]
    sys.exit(worker.main())

"""The stand-in trainer rank of the benchmarks: the real protocol, and no training.

python tools/stand_in_trainer.py SECONDS        (of a step; the environment of a rank)
"""

import os
import sys
import time
from types import SimpleNamespace

from checkout import explained

with explained():
    from megatron_scalerl.trainer import messages, worker
    from megatron_scalerl.types import StepReport

INFO = messages.TrainerInfo(dp_size=1, parameters=1, device="stand-in", backend="gloo", logits="fp32")

STEP_SECONDS = float(sys.argv[1]) if __name__ == "__main__" else 0.0


class StandInWorker:
    """Reports steps that it did not make."""

    def __init__(self, recipe, rendezvous, run_dir):
        rank = int(os.environ["RANK"])
        self.parallel = SimpleNamespace(rank=rank, dp_rank=0, holds_batch=rank == 0)
        self._tokens = 0

    def info(self):
        """Facts about no trainer."""
        return INFO

    def hold(self, frames):
        """Take a batch."""
        self._tokens = sum(frame.nbytes for frame in frames[1:]) // 8
        batch = messages.decode_for_rank(frames)
        assert isinstance(batch, messages.Prepare), batch
        return messages.BatchReceived(rank=0, step=batch.plan.step)

    def run(self, command):
        """The report of a step."""
        assert isinstance(command, messages.Step), command
        begin = time.perf_counter()
        time.sleep(STEP_SECONDS)
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

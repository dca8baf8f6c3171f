"""The game of examples/taskset with a fault that a row asks for; imported in the library's virtual environment."""

import asyncio
import json
from pathlib import Path

import guess
import verifiers.v1 as vf

__all__ = ["FaultsTaskset", "GuessEnv", "GuessHarness"]
GuessEnv = guess.GuessEnv
GuessHarness = guess.GuessHarness


class FaultsData(guess.GuessData):
    """A game."""

    file: str = ""
    """Where the tokens of the trace are written."""
    fails: bool = False
    hangs: bool = False
    """Whether its score takes for ever; the file has its state."""


class FaultsTask(vf.Task[FaultsData]):
    """The game's rewards."""

    @vf.reward(weight=0.5)
    async def found(self, trace: vf.Trace) -> float:
        """Half a point for the number."""
        if self.data.hangs:
            Path(self.data.file).write_text("scored")
            try:
                await asyncio.Event().wait()
            finally:
                Path(self.data.file).write_text("cancelled")
        branches = [[branch.token_ids, branch.sampled_mask, branch.logprobs] for branch in trace.branches]
        Path(self.data.file).write_text(json.dumps(branches))
        if self.data.fails:
            raise ZeroDivisionError("no score")
        return float(trace.last_reply == str(self.data.number))


class FaultsTaskset(vf.Taskset[FaultsTask]):
    """Two games."""

    def load(self) -> list[FaultsTask]:
        """The games."""
        return [FaultsTask(FaultsData(prompt="2;8=", number=number), self.config.task) for number in (2, 7)]

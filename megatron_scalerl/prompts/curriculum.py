"""Order of prompts: shuffled epochs of each task, without prompts that the policy already solves.

No-positive-resampling (Khatri et al. 2025, arXiv 2510.13786, section 3.2): a prompt whose pass rate reached 0.9 is
removed permanently from later epochs. The paper does not say which pass rate counts: here the latest scored group's,
as known when the prompt is drawn, so that groups that are scored during an epoch count.

A mixture draws the tasks in a fixed order, not at random, so that a batch's composition adds no noise: in every
stretch of draws each task gets the share of prompts that the task's weight demands, to within 1 prompt (smooth
weighted round-robin). Every task has separate epochs. When a task has no prompts left, the remaining tasks keep their
proportions.
"""

import random
from collections.abc import Mapping, Sequence

from megatron_scalerl.types import Prompt


class CurriculumDry(Exception):
    """No prompt is left to draw; the message gives the reason."""


class Curriculum:
    """Draws training prompts at random, epoch by epoch, for each task separately.

    The order of an epoch depends only on the set of the task's prompts, the seed and the epoch's number, not on the
    order of the file or on rewards. `no_positive_resampling` is the least pass rate at which a prompt is removed
    (None: never), `max_epochs` the number of epochs of each task (None: no limit), `weights` the weight of each task
    (None: all prompts belong to one task).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        no_positive_resampling: float | None,
        max_epochs: int | None = None,
        weights: Mapping[str, float] | None = None,
    ):
        weights = weights or {prompt.task: 1.0 for prompt in prompts[:1]}
        assert weights.keys() == {prompt.task for prompt in prompts}, "the prompts and weights name different tasks"
        self._tasks = {
            name: _Task([p for p in prompts if p.task == name], seed, no_positive_resampling, max_epochs)
            for name in sorted(weights)
        }
        self._task_of = {prompt.prompt_id: self._tasks[prompt.task] for prompt in prompts}
        assert len(self._task_of) == len(prompts), "prompt ids repeat"
        self._weights = dict(weights)
        self._credit = dict.fromkeys(self._tasks, 0.0)
        self._end_reasons: dict[str, str] = {}
        self.epoch = 0
        """Epoch (from 0) of the latest drawn prompt, counted in the prompt's task."""

    @property
    def removed(self) -> int:
        """Number of prompts removed so far. A prompt that reached the pass rate is removed at the next draw of the
        prompt."""
        return sum(len(task.removed) for task in self._tasks.values())

    @property
    def skipped(self) -> int:
        """Number of removed prompts that draws passed over so far, over all epochs.

        Over a stretch of draws, skipped / (skipped + drawn) is the share of removed prompts.
        """
        return sum(task.skipped for task in self._tasks.values())

    def draw(self) -> tuple[Prompt, int]:
        """(next prompt, epoch from 0). Raises CurriculumDry, at every call, when no prompt is left."""
        while len(self._end_reasons) < len(self._tasks):
            name = self._next_task()
            try:
                prompt, self.epoch = self._tasks[name].draw()
            except CurriculumDry as end:
                self._end_reasons[name] = f"{name}: {end}" if name else str(end)
                # the shares now exclude this task, so all credits start again from 0
                self._credit = dict.fromkeys(self._tasks, 0.0)
                continue
            self._credit[name] -= 1.0
            return prompt, self.epoch
        raise CurriculumDry("; ".join(self._end_reasons[name] for name in self._tasks))

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Record the pass rate of this prompt's latest scored group; truncated completions count as wrong."""
        self._task_of[prompt_id].observe(prompt_id, pass_rate)

    def _next_task(self) -> str:
        """The task that has had the fewest draws compared with the share of draws that the task's weight demands."""
        open_tasks = [name for name in self._tasks if name not in self._end_reasons]
        total = sum(self._weights[name] for name in open_tasks)
        for name in open_tasks:
            self._credit[name] += self._weights[name] / total
        return max(open_tasks, key=lambda name: self._credit[name])


class _Task:
    """Draws the prompts of one task in shuffled epochs, without removed prompts."""

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, no_positive_resampling: float | None, max_epochs: int | None
    ):
        assert prompts, "a task of the curriculum has no prompts"
        self._prompts = {prompt.prompt_id: prompt for prompt in sorted(prompts, key=lambda p: p.prompt_id)}
        self._seed = seed
        self._threshold = no_positive_resampling
        self._max_epochs = max_epochs
        self._epoch = -1
        self._remaining_ids: list[str] = []
        """Ids of the epoch's prompts that are not yet drawn; the next prompt is last."""
        self._latest: dict[str, float] = {}
        self.removed: set[str] = set()
        self.skipped = 0

    def draw(self) -> tuple[Prompt, int]:
        """(next prompt of this task, epoch from 0). Raises CurriculumDry when no prompt is left."""
        while True:
            if not self._remaining_ids:
                self._begin_next_epoch()
            identity = self._remaining_ids.pop()
            if self._is_removed(identity):
                self.skipped += 1
                continue
            return self._prompts[identity], self._epoch

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        assert 0.0 <= pass_rate <= 1.0, pass_rate
        self._latest[prompt_id] = pass_rate

    def _begin_next_epoch(self) -> None:
        if len(self.removed) == len(self._prompts):
            raise CurriculumDry(
                f"all {len(self._prompts)} prompts reached pass rate {self._threshold} "
                f"(curriculum.no_positive_resampling) by epoch {self._epoch}"
            )
        if self._epoch + 1 == self._max_epochs:
            raise CurriculumDry(f"curriculum.max_epochs {self._max_epochs} reached")
        self._epoch += 1
        # each epoch has a random generator, so a resumed run gets the epoch's order without drawing earlier epochs
        order = list(self._prompts)
        random.Random(f"curriculum {self._seed} epoch {self._epoch}").shuffle(order)
        self._remaining_ids = order[::-1]

    def _is_removed(self, identity: str) -> bool:
        """Whether a draw skips the prompt; a prompt that was removed stays removed, whatever pass rate is recorded
        later."""
        if self._threshold is not None and self._latest.get(identity, -1.0) >= self._threshold:
            self.removed.add(identity)
        return identity in self.removed

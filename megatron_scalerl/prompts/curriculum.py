"""Order of prompts: shuffled epochs, without prompts that the policy already solves.

No-positive-resampling (Khatri et al. 2025, arXiv 2510.13786, section 3.2): a prompt whose pass rate reached 0.9 is
removed permanently from later epochs. Choices where the paper is silent: the pass rate is that of the prompt's latest
scored group, and it is checked when the prompt is drawn, so that a group scored after the epoch began still counts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_scalerl.types import Prompt


class CurriculumDry(Exception):
    """No prompt is left to draw; the message gives the reason."""


class Curriculum:
    """Draws training prompts epoch by epoch.

    The order of an epoch depends on the set of prompts, the seed and the epoch's number alone, not on the order of
    the file or on scores. `no_positive_resampling` is the least pass rate at which a prompt is removed (None:
    never), `max_epochs` the number of epochs (None: no limit).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        no_positive_resampling: float | None,
        max_epochs: int | None = None,
    ) -> None:
        assert prompts, "a curriculum needs prompts"
        self._prompts = {prompt.prompt_id: prompt for prompt in sorted(prompts, key=lambda p: p.prompt_id)}
        assert len(self._prompts) == len(prompts), "prompt ids repeat"
        self._seed = seed
        self._threshold = no_positive_resampling
        self._max_epochs = max_epochs
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self._latest: dict[str, float] = {}
        self._removed: set[str] = set()

    @property
    def removed(self) -> int:
        """Number of prompts removed so far; a solved prompt is removed when it would be drawn again."""
        return len(self._removed)

    @property
    def epoch(self) -> int:
        """Epoch of the last draw, from 0."""
        return self._epoch

    def draw(self) -> tuple[Prompt, int]:
        """The next prompt and its epoch, from 0. Raises CurriculumDry, at every call, when none is left."""
        while True:
            if self._position == len(self._order):
                self._begin_next_epoch()
            identity = self._order[self._position]
            self._position += 1
            if self._is_removed(identity):
                continue
            return self._prompts[identity], self._epoch

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Record the pass rate of this prompt's latest scored group; truncated completions count as wrong."""
        assert prompt_id in self._prompts, prompt_id
        assert 0.0 <= pass_rate <= 1.0, pass_rate
        self._latest[prompt_id] = pass_rate

    def _begin_next_epoch(self) -> None:
        if len(self._removed) == len(self._prompts):
            raise CurriculumDry(
                f"all {len(self._prompts)} prompts reached pass rate {self._threshold} "
                f"(curriculum.no_positive_resampling) by epoch {self._epoch}"
            )
        if self._epoch + 1 == self._max_epochs:
            raise CurriculumDry(f"curriculum.max_epochs {self._max_epochs} reached")
        self._epoch += 1
        self._position = 0
        self._order = self._order_of(self._epoch)

    def _is_removed(self, identity: str) -> bool:
        """Checked at draw time; a removed prompt stays removed whatever is scored later."""
        if self._threshold is not None and self._latest.get(identity, -1.0) >= self._threshold:
            self._removed.add(identity)
        return identity in self._removed

    def _order_of(self, epoch: int) -> list[str]:
        order = list(self._prompts)
        random.Random(f"curriculum {self._seed} epoch {epoch}").shuffle(order)
        return order

"""A group on its way to an engine: new, issued again after an eviction, or repeated after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_scalerl.rollouts.sampler import ScoredCompletion
from megatron_scalerl.types import Prompt, RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A group to generate."""

    group_id: int
    prompt: Prompt
    epoch: int
    kept: dict[int, ScoredCompletion | None] = field(default_factory=dict)
    """Completions that finished before their engine was evicted, by index; None for a lost one."""
    redraws: int = 0
    """How often all of its completions were lost: each time, they get draws that the group has not had."""
    recorded: RolloutGroup | None = None
    """The group itself if it had finished before a restart and is only generated for the others of its round."""

    @property
    def counted(self) -> bool:
        """True if the gate counts the group: it is recorded, or a kept completion fixes its deadline."""
        return self.recorded is not None or any(result is not None for result in self.kept.values())

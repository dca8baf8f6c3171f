"""The staleness gate of PipelineRL-k: which group may start, which batch may train. Pure bookkeeping.

Versions count optimiser steps: the batch that is trained by policy version v turns it into v + 1. A group
whose oldest first token came from version u has the deadline u + k: it must train at a version <= u + k.
Nothing is ever dropped for age, because dropping favours short completions. Two rules keep the bound
(Khatri et al. 2025, section 2 name the bound k = 8; the rules are ours):

* admission: a group starts only while fewer than (k + 1) * G groups are outstanding: in flight, ready, or in
  the batch whose step is being made (until its new version is served, young groups still start at the old one);
* waiting: a batch of G ready groups, earliest deadline first, is released at version v only if what stays
  behind can still meet its deadlines, that is for every j = 1..k at most j * G outstanding groups have a
  deadline <= v + j, and none has one <= v.

With the first rule, at most (j + 1) * G outstanding groups have a deadline <= v + j for every j (all of
them have one <= v + k). The second rule carries this from v to v + 1. Once everything outstanding is
ready, taking the earliest deadlines always satisfies it, and every group in flight becomes ready, so the
wait ends. Waiting only for groups whose deadline is v would not be enough: young, quick groups could
fill the batches while slow ones with one and the same later deadline pile up beyond G.
"""

from __future__ import annotations

import bisect


class StalenessGate:
    """Admission and batch composition for `max_staleness_steps` = k; k = 0 is synchronous training."""

    def __init__(self, *, groups_per_batch: int, max_staleness_steps: int) -> None:
        assert groups_per_batch >= 1 and max_staleness_steps >= 0
        self.groups_per_batch = groups_per_batch
        self.max_staleness_steps = max_staleness_steps
        self._in_flight: dict[int, int] = {}
        self._ready: dict[int, int] = {}
        self._training = 0

    @property
    def in_flight(self) -> int:
        """Groups started and not finished."""
        return len(self._in_flight)

    @property
    def ready(self) -> int:
        """Groups finished and not yet taken."""
        return len(self._ready)

    @property
    def outstanding(self) -> int:
        """Groups in flight, ready or in training; at most (k + 1) * groups_per_batch."""
        return len(self._in_flight) + len(self._ready) + self._training

    def may_start(self) -> bool:
        """True while one more group keeps the admission rule."""
        return self.outstanding < (self.max_staleness_steps + 1) * self.groups_per_batch

    def start(self, group_id: int, policy_version: int) -> None:
        """A group is submitted; no first token can be older than the version that the engine serves now."""
        assert self.may_start() and group_id not in self._in_flight and group_id not in self._ready
        self._in_flight[group_id] = policy_version + self.max_staleness_steps

    def finish(self, group_id: int, first_token_version: int) -> None:
        """A group is scored; its true deadline is never earlier than the one it started with."""
        lower = self._in_flight.pop(group_id)
        deadline = first_token_version + self.max_staleness_steps
        assert deadline >= lower, f"group {group_id}: first token older than its admission"
        self._ready[group_id] = deadline

    def abandon(self, group_id: int) -> None:
        """A group in flight comes to nothing; it may start again, with a later deadline."""
        del self._in_flight[group_id]

    def restore(self, group_id: int, first_token_version: int) -> None:
        """A finished group comes back from the journal after a restart."""
        self._ready[group_id] = first_token_version + self.max_staleness_steps

    def batch(self, policy_version: int) -> tuple[int, ...] | None:
        """The groups that version `policy_version` may train now, earliest deadline first, or None: wait."""
        if len(self._ready) < self.groups_per_batch:
            return None
        order = sorted(self._ready, key=lambda g: (self._ready[g], g))
        chosen = order[: self.groups_per_batch]
        left = sorted([*self._in_flight.values(), *(self._ready[g] for g in order[self.groups_per_batch :])])
        for ahead in range(self.max_staleness_steps + 1):
            if bisect.bisect_right(left, policy_version + ahead) > ahead * self.groups_per_batch:
                return None
        return tuple(chosen)

    def take(self, group_ids: tuple[int, ...]) -> None:
        """The groups of a released batch go into training."""
        assert not self._training, "one batch trains at a time"
        for group_id in group_ids:
            del self._ready[group_id]
        self._training = len(group_ids)

    def trained(self) -> None:
        """The batch is done with: its new version is served, or it made no step."""
        self._training = 0

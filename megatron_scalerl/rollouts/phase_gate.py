"""The gate of PPO-off-policy-k: which group may start, which batch may train. Pure bookkeeping.

(Khatri et al. 2025, arXiv 2510.13786, section 3.1.) One version of the policy generates the k * G groups of a phase;
then they are trained on in k batches of G. Generation and training alternate:

* admission: a group starts only while the phase has fewer than k * G groups, those that were trained on included. So
  none starts from the first batch of a phase until the last one is done and the engines have the new weights;
* waiting: no batch is released before every group of the phase has finished.

Bound: the phase starts at version v. Its groups have no other version, since the engines get none before the phase
is over. At most one optimizer step per batch: batch j = 0..k-1 of the phase trains at a version <= v + j, so no
group is older than k - 1 steps, and the wait ends because every group in flight becomes ready.

Composition: batch j has the groups j * G .. (j + 1) * G - 1 of the phase in the order of admission, which is fixed
before anything of the phase is generated. The curriculum has shuffled the prompts with the run's seed, so this is an
unbiased split; in the order of completion the first batches would have the short completions. After a restart the
remaining batches follow from the journal alone: its finished groups that are in no batch, in the same order.

Where the prompts run out (`exhaust`), the phase ends with the groups that it has; what does not fill a batch is left.

A phase of two batches of one group each; the second group finishes first:

    >>> gate = PhaseGate(groups_per_batch=1, updates_per_phase=2)
    >>> for group in (0, 1):
    ...     gate.start(group, policy_version=5)
    >>> gate.finish(1, first_token_version=5)
    >>> gate.may_start(), gate.batch(policy_version=5)  # group 0 is in flight
    (False, None)
    >>> gate.finish(0, first_token_version=5)
    >>> gate.batch(policy_version=5)
    (0,)
    >>> gate.take((0,))
    >>> gate.trained()  # the engines still serve version 5
    >>> gate.may_start(), gate.batch(policy_version=6)
    (False, (1,))
    >>> gate.take((1,))
    >>> gate.trained()  # every engine serves version 7
    >>> gate.may_start()
    True
"""

from __future__ import annotations

from megatron_scalerl.recipe.sections import RolloutsSection
from megatron_scalerl.rollouts.gate import StalenessGate


class PhaseGate(StalenessGate):
    """Admission and batch composition for k = `updates_per_phase`; k = 1 is synchronous training."""

    def __init__(self, *, groups_per_batch: int, updates_per_phase: int) -> None:
        assert updates_per_phase >= 1
        super().__init__(groups_per_batch=groups_per_batch, max_staleness_steps=updates_per_phase - 1)
        self._size = groups_per_batch * updates_per_phase
        self._done = 0
        """Groups of the phase whose batch is done."""
        self._abandoned: set[int] = set()
        self._exhausted = False

    def may_start(self) -> bool:
        """True if the phase lacks groups."""
        return self.outstanding + self._done < self._size

    def start(self, group_id: int, policy_version: int) -> None:
        """As `StalenessGate.start`; all groups of a phase start at one version."""
        super().start(group_id, policy_version)
        self._abandoned.discard(group_id)

    def abandon(self, group_id: int) -> None:
        """A group in flight is discarded; it starts again in the same phase."""
        super().abandon(group_id)
        self._abandoned.add(group_id)

    def exhaust(self) -> None:
        """There are no new groups: the phase has no more than it has now."""
        self._exhausted = True

    def resume(self, batches: int) -> None:
        """After a restart so many batches of the run are done, whole phases and a part of the next one."""
        self._done = batches * self.groups_per_batch % self._size

    def batch(self, policy_version: int) -> tuple[int, ...] | None:
        """The next groups of the phase in the order of admission; None until the whole phase is ready."""
        missing = self._abandoned or (self.may_start() and not self._exhausted)
        if self._in_flight or missing or len(self._ready) < self.groups_per_batch:
            return None
        return tuple(sorted(self._ready)[: self.groups_per_batch])

    def trained(self) -> None:
        """A batch is done; after the last one of a phase, every engine serves the new version."""
        self._done = (self._done + self._training) % self._size
        super().trained()


def gate_of(rollouts: RolloutsSection) -> StalenessGate:
    """The gate of a recipe's schedule."""
    size = rollouts.groups_per_batch
    if rollouts.schedule == "ppo_off_policy":
        return PhaseGate(groups_per_batch=size, updates_per_phase=rollouts.updates_per_phase)
    return StalenessGate(groups_per_batch=size, max_staleness_steps=rollouts.max_staleness_steps)

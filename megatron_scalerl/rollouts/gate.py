"""The staleness gate of PipelineRL-k: decides which group of completions may start, and which batch may train.

The life of a group in the gate: `start` (in flight), `finish` (ready), `take` (in a batch), `trained` (done, out of
the gate). A group in flight can also leave by `drop`, for good, or by `abandon`, after which the group may start
again.

Versions count optimizer steps: training on a batch of G groups turns policy version v into v + 1. The deadline of a
group is u + k: the group must be trained on at a version <= u + k. Here u is the oldest version that sampled the
first token of a completion in the group, and k is `max_staleness_steps`. No group is dropped for age, because
dropping would favor short completions. Two rules maintain the bound (the bound, k = 8, is from Khatri et al. 2025,
section 2; the rules are ours):

* admission: a group starts only while fewer than (k + 1) * G groups are outstanding, that is in flight, ready, or
  in a batch that was taken and is not done (until the batch's new version is served, new groups start at the old
  version);
* waiting: a batch of G ready groups, earliest deadline first, is released at version v only if the remaining groups
  can still meet their deadlines: for every j = 1..k at most j * G outstanding groups have a deadline <= v + j, and
  no remaining group has a deadline <= v.

Invariant at version v: for every j = 0..k at most (j + 1) * G outstanding groups have a deadline <= v + j. For j = k
the invariant is the first rule, as no deadline is later. For j < k, by induction: at the start every deadline is
v + k; a batch released at v leaves at most j * G groups with a deadline <= v + j for j = 1..k, which is the invariant
for j - 1 at v + 1; and groups that start at v + 1 have deadlines >= v + 1 + k. Once all outstanding groups are ready,
taking the earliest deadlines always satisfies the invariant, and every group in flight becomes ready, so the wait
ends. Waiting only for groups whose deadline is v would not be enough: young, fast groups could fill the batches while
more than G slow groups with the same later deadline accumulate.

The next batch: while one batch trains at version v, the next batch may be taken by the same rule at v + 1. The bound
still holds:

* Only groups that start between this choice and the new version are unknown to the rule. These groups start at v and
  have the deadline v + k = (v + 1) + (k - 1): for j < k - 1 nothing changes.
* When such a group starts, at most (k + 1) * G groups are outstanding, and 2 * G groups are in the two batches. So at
  most (k - 1) * G groups remain, whatever the deadlines: the rule at v + 1 holds for j = k - 1, and for j = k.
* No group in the second batch is late. The first batch left no group with a deadline <= v, and groups started since
  have the deadline v + k >= v + 1; with k = 0 no group has started, and only the first batch is outstanding.

If the first batch makes no step, the second batch trains at v: the rule at v + 1 implies the rule at v.

`PhaseGate` has the schedule in which generation and training alternate.

Three groups start at version 0; the two fast ones finish first:

    >>> gate = StalenessGate(groups_per_batch=1, max_staleness_steps=2)
    >>> for group in (0, 1, 2):
    ...     gate.start(group, policy_version=0)
    >>> gate.may_start()  # (k + 1) * G = 3 groups are outstanding
    False
    >>> gate.batch(policy_version=0) is None  # no group is ready
    True
    >>> gate.finish(0, first_token_version=0)
    >>> gate.batch(policy_version=0)
    (0,)
    >>> gate.take((0,))
    >>> gate.trained()  # every engine serves version 1

A group that starts now has one more step until its deadline. This group 3 is ready at once, and still has to wait:
the groups 1 and 2 both must be trained on by version 2, so group 1 or 2 must be next.

    >>> gate.start(3, policy_version=1)
    >>> gate.finish(3, first_token_version=1)
    >>> gate.batch(policy_version=1) is None
    True
    >>> gate.finish(2, first_token_version=0)
    >>> gate.batch(policy_version=1)
    (2,)

While group 2 trains, the batch of version 2 is taken. Both batches count until they are done.

    >>> gate.take((2,))
    >>> gate.finish(1, first_token_version=0)
    >>> gate.batch(policy_version=2)
    (1,)
    >>> gate.take((1,))
    >>> gate.outstanding, gate.may_start()  # 1, 2 and 3
    (3, False)
    >>> gate.trained()  # every engine serves version 2
    >>> gate.outstanding
    2

After a restart the groups that were outstanding, or fewer groups, are restored. k cannot change within a run
(`controller.run_folder.MAY_CHANGE`), so the bound still holds.

**The gate of PPO-off-policy-k** (`PhaseGate`; Khatri et al. 2025, arXiv 2510.13786, section 3.1). One version of the
policy generates the k * G groups of a phase; then the groups are trained on in k batches of G. Generation and
training alternate:

* admission: a group starts only while the phase has fewer than k * G groups, trained groups included. So no group
  starts from the first batch of a phase until the last batch is done and the engines have the new weights;
* waiting: no batch is released before every group of the phase has finished.

Bound: the phase starts at version v. All groups of the phase have this version, since the engines get no new weights
before the phase is over. A batch makes at most one optimizer step: batch j = 0..k-1 of the phase trains at a version
<= v + j, so no group is older than k - 1 steps, and the wait ends because every group in flight becomes ready.

Composition: batch j has the groups j * G .. (j + 1) * G - 1 of the phase in the order of admission, which is fixed
before the phase generates anything. The curriculum has shuffled the prompts with the run's seed, so the split is
unbiased; in the order of completion the first batches would have the short completions. After a restart the remaining
batches follow from the journal alone: finished groups that are in no batch, in the same order.

If the prompts run out (`exhaust`), the phase ends with the groups started so far; groups that do not fill a batch are
left over.

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

import bisect

from megatron_scalerl.recipe.sections import RolloutsSection


class StalenessGate:
    """Decides which groups start and which groups form a batch, so that no token is older than k optimizer steps.

    k is `max_staleness_steps`; k = 0 is synchronous training.
    """

    def __init__(self, *, groups_per_batch: int, max_staleness_steps: int):
        assert groups_per_batch >= 1 and max_staleness_steps >= 0
        self.groups_per_batch = groups_per_batch
        self.max_staleness_steps = max_staleness_steps
        self._in_flight: dict[int, int] = {}
        """Id of a group in flight -> earliest possible deadline (policy version)."""
        self._ready: dict[int, int] = {}
        """Id of a ready group -> deadline (policy version)."""
        self._training = 0
        """Number of groups in the batch that trains."""
        self._next = 0
        """Number of groups in the batch that was taken ahead and trains next."""

    @property
    def in_flight(self) -> int:
        """Number of groups that have started and not finished."""
        return len(self._in_flight)

    @property
    def ready(self) -> int:
        """Number of groups that have finished and are not in a batch."""
        return len(self._ready)

    @property
    def outstanding(self) -> int:
        """Number of groups in flight, ready or in an unfinished batch; at most (k + 1) * groups_per_batch."""
        return len(self._in_flight) + len(self._ready) + self._training + self._next

    def may_start(self) -> bool:
        """True if one more group may start within the staleness bound."""
        return self.outstanding < (self.max_staleness_steps + 1) * self.groups_per_batch

    def start(self, group_id: int, policy_version: int) -> None:
        """Count a group that starts. policy_version: the version that the engines serve; no token can be older."""
        assert self.may_start() and group_id not in self._in_flight and group_id not in self._ready
        self._in_flight[group_id] = policy_version + self.max_staleness_steps

    def finish(self, group_id: int, first_token_version: int) -> None:
        """Count a scored group as ready. first_token_version: oldest version of a completion's first token, which
        decides the deadline."""
        earliest = self._in_flight.pop(group_id)
        deadline = first_token_version + self.max_staleness_steps
        assert deadline >= earliest, f"group {group_id}: the first token is older than its start"
        # If a weight update came between start and first token, the deadline is later than was assumed at the start.
        self._ready[group_id] = deadline

    def drop(self, group_id: int) -> None:
        """Discard a group in flight. The group does not start again, or starts later as a new group."""
        del self._in_flight[group_id]

    def abandon(self, group_id: int) -> None:
        """Discard a group in flight, which may start again with a later deadline."""
        self.drop(group_id)

    def restore(self, group_id: int, first_token_version: int) -> None:
        """Count a finished group from the journal as ready, after a restart."""
        self._ready[group_id] = first_token_version + self.max_staleness_steps

    def forget_ready(self) -> None:
        """Discard the groups that `restore` counted as ready; the caller generates the groups again."""
        self._ready.clear()

    def exhaust(self) -> None:
        """Note that the prompts are exhausted. Does nothing in this class, since no batch waits for new groups."""

    def resume(self, batches: int) -> None:
        """Note after a restart that the run has finished `batches` batches. Does nothing in this class, whose rules
        count no batches."""

    def batch(self, policy_version: int) -> tuple[int, ...] | None:
        """Ids of the groups to train on at `policy_version`, earliest deadline first; None if the trainer must wait.

        policy_version: the current version; or, while a batch trains, the version after the batch's step.
        """
        if len(self._ready) < self.groups_per_batch:
            return None
        # Equal deadlines are sorted by group id, so that the batch does not depend on which group finished first.
        order = sorted(self._ready, key=lambda group: (self._ready[group], group))
        chosen_groups = order[: self.groups_per_batch]
        remaining_groups = order[self.groups_per_batch :]
        deadlines = sorted([*self._in_flight.values(), *(self._ready[group] for group in remaining_groups)])
        # The waiting rule of the module: at most j * G remaining groups have a deadline <= v + j, for j = 0 to k.
        for j in range(self.max_staleness_steps + 1):
            if bisect.bisect_right(deadlines, policy_version + j) > j * self.groups_per_batch:
                return None
        return tuple(chosen_groups)

    def take(self, group_ids: tuple[int, ...]) -> None:
        """Count the groups that `batch` returned as the batch that trains now, or next if a batch still trains."""
        assert not self._next, "one batch trains and one is taken ahead: no third batch can be taken"
        for group_id in group_ids:
            del self._ready[group_id]
        if self._training:
            self._next = len(group_ids)
        else:
            self._training = len(group_ids)

    def trained(self) -> None:
        """Note that the training batch is done: every engine serves the new version, or no step was made."""
        self._training = self._next
        self._next = 0


class PhaseGate(StalenessGate):
    """Gate of PPO-off-policy-k: alternates between generating the groups of a phase and training on k batches.

    k is `updates_per_phase`; k = 1 is synchronous training.
    """

    def __init__(self, *, groups_per_batch: int, updates_per_phase: int):
        assert updates_per_phase >= 1
        super().__init__(groups_per_batch=groups_per_batch, max_staleness_steps=updates_per_phase - 1)
        self._size = groups_per_batch * updates_per_phase
        self._done = 0
        """Number of groups of the present phase that are in finished batches."""
        self._abandoned: set[int] = set()
        """Ids of groups that will start again, for which the phase waits even if the prompts are exhausted."""
        self._exhausted = False

    def may_start(self) -> bool:
        """True if the phase has fewer than k * groups_per_batch groups."""
        return self.outstanding + self._done < self._size

    def start(self, group_id: int, policy_version: int) -> None:
        """Count a group that starts; all groups of a phase start at the same policy version."""
        super().start(group_id, policy_version)
        self._abandoned.discard(group_id)

    def abandon(self, group_id: int) -> None:
        """Discard a group in flight, which will start again in the same phase."""
        super().abandon(group_id)
        self._abandoned.add(group_id)

    def exhaust(self) -> None:
        """Note that no group will start any more: the phase ends with the groups started so far."""
        self._exhausted = True

    def resume(self, batches: int) -> None:
        """Note after a restart that the run has finished `batches` batches: whole phases and a part of a phase."""
        self._done = batches * self.groups_per_batch % self._size

    def batch(self, policy_version: int) -> tuple[int, ...] | None:
        """Ids of the next groups of the phase, in the order of admission; None until the whole phase is ready."""
        incomplete = self._in_flight or self._abandoned or (self.may_start() and not self._exhausted)
        if incomplete or len(self._ready) < self.groups_per_batch:
            return None
        # Batches follow the order of admission: in the order of finishing, short completions would come first.
        return tuple(sorted(self._ready)[: self.groups_per_batch])

    def trained(self) -> None:
        """Note that a batch is done; after the last batch of a phase, every engine serves the new version."""
        self._done = (self._done + self._training) % self._size
        super().trained()


def gate_of(rollouts: RolloutsSection) -> StalenessGate:
    """The gate for the schedule in the recipe's `rollouts`: pipeline or ppo_off_policy."""
    size = rollouts.groups_per_batch
    if rollouts.schedule == "ppo_off_policy":
        return PhaseGate(groups_per_batch=size, updates_per_phase=rollouts.updates_per_phase)
    return StalenessGate(groups_per_batch=size, max_staleness_steps=rollouts.max_staleness_steps)

"""Assigns samples to data-parallel ranks and micro-batches by their lengths, without the tokens.

The controller assigns (`plan_step`). The trainer's rank, which has the tokens, builds the columns from a `RankPlan`
and the completions' bytes (`packing.build`).

Every rank gets the same number of micro-batches: expert and pipeline parallel ranks run collectives in each
micro-batch, and a missing micro-batch would hang the group. The weights of tokens are computed before the assignment,
so the assignment changes neither loss nor gradient.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain

from megatron_scalerl.record import record
from megatron_scalerl.types import Sample

ReadCompletions = Callable[[Sequence[int]], Awaitable[Sequence[bytes]]]
"""A function that takes sample numbers and returns the completions of the numbered samples in the same order, as
bytes (`rollout_bytes`).

The controller calls the function once for each data-parallel rank, when that rank's message is sent. So a store of
files reads the completions of one rank at a time, in a thread and not on the event loop.
"""


@record
class SampleFacts:
    """A `types.Sample` with the completion's length in place of the completion."""

    prompt_token_ids: tuple[int, ...]
    """[P] token ids of the prompt."""
    tokens: int
    """T, tokens of the completion."""
    advantage: float | tuple[float, ...]
    """Normalized advantage: one number for every token of the completion, or [T] a number for each token."""
    token_weight: float
    """Weight of each loss-mask token in the summed loss."""

    @property
    def length(self) -> int:
        """P + T, tokens of prompt and completion."""
        return len(self.prompt_token_ids) + self.tokens


@record
class RankPlan:
    """The share of one data-parallel rank in an optimizer step, without completions. Produced by `plan_step`."""

    step: int
    """The optimizer step, from 1."""
    policy_version: int
    """Version of the weights to train; a token's staleness is this version minus the token's version."""
    micro_batches: tuple[tuple[SampleFacts, ...], ...]
    """Samples of each micro-batch, in the order of the sequences; an empty micro-batch (filler) has no samples."""

    @property
    def samples(self) -> list[SampleFacts]:
        """The samples of all micro-batches, in the order in which `packing.build` gets the completions."""
        return list(chain.from_iterable(self.micro_batches))


@record
class StepPlan:
    """The shares of all data-parallel ranks in an optimizer step. Produced by `plan_step`."""

    ranks: tuple[RankPlan, ...]
    numbers: tuple[tuple[int, ...], ...]
    """Sample numbers of each rank, in the order of `RankPlan.samples`; every sample occurs once."""

    @property
    def step(self) -> int:
        """The optimizer step, from 1."""
        return self.ranks[0].step


def plan_step(
    samples: Sequence[SampleFacts], *, step: int, dp_size: int, micro_batch_tokens: int, policy_version: int
) -> StepPlan:
    """The step's plan, balanced by tokens over `dp_size` ranks.

    Samples are assigned, longest first, to the rank with the fewest tokens, and on each rank first-fit to
    micro-batches of at most `micro_batch_tokens`. Ranks with fewer micro-batches get empty micro-batches (fillers).
    Raises ValueError if a sample alone is longer than `micro_batch_tokens`.
    """
    assert samples, "plan_step got no samples; a step needs at least one"
    lengths = [sample.length for sample in samples]
    for index, length in enumerate(lengths):
        if length > micro_batch_tokens:
            raise ValueError(
                f"trainer.micro_batch_tokens is {micro_batch_tokens}; sample {index} needs at least {length}"
            )
    # Ranks are balanced first, then micro-batches, because the slowest rank decides the time of the step.
    bins = [_first_fit(members, lengths, micro_batch_tokens) for members in _balance(lengths, dp_size)]
    count = max(map(len, bins))
    ranks = []
    numbers = []
    for rank_bins in bins:
        rows = [tuple(samples[i] for i in members) for members in rank_bins]
        # Without fillers, collectives of a micro-batch would wait for a rank that has fewer micro-batches.
        fillers = [()] * (count - len(rows))
        plan = RankPlan(step=step, policy_version=policy_version, micro_batches=(*rows, *fillers))
        ranks.append(plan)
        numbers.append(tuple(chain.from_iterable(rank_bins)))
    return StepPlan(ranks=tuple(ranks), numbers=tuple(numbers))


def sample_facts(sample: Sample) -> SampleFacts:
    """The `SampleFacts` of a sample in memory."""
    return SampleFacts(
        prompt_token_ids=sample.prompt_token_ids,
        tokens=len(sample.rollout.token_ids),
        advantage=sample.advantage,
        token_weight=sample.token_weight,
    )


def _balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sample numbers of each rank, longest first; each sample goes to the rank with the fewest tokens so far."""
    members: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # The sort is stable, so samples of equal length stay in order and the assignment follows from the lengths alone.
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        members[rank].append(index)
        loads[rank] += lengths[index]
    return members


def _first_fit(members: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """`members`, sorted by the caller, in bins of at most `capacity` tokens: longest first puts similar lengths into
    one bin."""
    bins: list[list[int]] = []
    free_tokens: list[int] = []
    for index in members:
        length = lengths[index]
        bin_number = next((b for b, room in enumerate(free_tokens) if room >= length), len(bins))
        if bin_number == len(bins):
            bins.append([])
            free_tokens.append(capacity)
        bins[bin_number].append(index)
        free_tokens[bin_number] -= length
    return bins

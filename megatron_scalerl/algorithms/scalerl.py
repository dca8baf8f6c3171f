"""The algorithm of ScaleRL, and the interface of every other algorithm: which completions are trained, and how.

The methods, in the order in which the calls for a group and for the group's batch are made:

    score         once, after the verifier and before the group is stored: the columns of the group's tokens
    trains        for each completion: whether the completion is trained on
    drop_reason   for each group, reduced to the completions that are trained on: why the group is left out, or ""
    advantages    for the remaining groups: a number for each completion, or for each token of a completion
    weights       for the remaining groups: the weight of each completion's tokens in the summed loss
    loss          on the trainer's ranks, for each micro-batch

The paper does not say over which values the standard deviation of rewards is taken. Here the population standard
deviation is taken, over one value for each completion that remains after filtering.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_scalerl.losses import Loss, is_separable, make_loss
from megatron_scalerl.losses.reduction import Reduction, token_weights
from megatron_scalerl.types import Completion, RolloutGroup

if TYPE_CHECKING:
    from megatron_scalerl.losses import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class ScaleRL:
    """The algorithm of ScaleRL (Khatri et al. 2025, arXiv 2510.13786, section 3.2, eq. 2 and 4).

    The default of each field is ScaleRL's choice; the other values are the paper's baselines.

    A subclass is another algorithm (recipe: algorithm.name `module:Class`). The subclass overrides a method, and the
    fields that a subclass adds are settings of the recipe's section. Controller and trainer ranks make equal objects,
    and a resumed run composes a batch again, so the methods have to be pure functions of arguments and fields.
    """

    metrics: ClassVar[Mapping[str, Literal["sum", "mean", "max"]]] = {}
    """Name of a number in `LossOutput.metrics` -> reduction over the tokens of a step. The result is loss/NAME in
    metrics.jsonl.

    Ranks without tokens report the numbers too, which is why the class has to declare the names. Values of a "max"
    are not negative.
    """
    columns: ClassVar[tuple[str, ...]] = ()
    """Names of the columns, [tokens] of float32, that `score` fills and `loss` gets as `LossInputs.columns`.

    Columns are stored with the group, for a resumed run and for the command `show`. With (), no column is stored or
    sent.
    """
    normalize: Literal["batch", "prompt", "none"] = "batch"
    """The recipe's setting advantages.normalize."""
    truncated: Literal["exclude", "wrong"] = "exclude"
    """The recipe's setting rewards.truncated.

    "exclude" leaves truncated completions out of loss and group mean. "wrong" keeps truncated completions, with the
    reward of an incorrect answer.
    """
    zero_variance: bool = True
    """The recipe's setting filters.zero_variance. If false, groups with equal rewards stay, with advantage 0, and
    count in the mean over prompts."""
    reduction: Reduction = "prompt_mean"
    """The recipe's setting loss.reduction."""
    loss_name: str = "cispo"
    """The recipe's setting loss.name."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the loss function, by name, where the recipe's section `loss` differs from the function's
    defaults."""

    async def score(self, group: RolloutGroup, samples: Sequence[Any]) -> Sequence[Mapping[str, Sequence[float]]]:
        """For each of `samples`, a mapping from each column's name to the values of the sample's tokens.

        samples: `batching.rollout_bytes.RolloutArrays` of the group's completions in order; an episode that forked
        has several (`Completion.samples`). The verifier has scored the completions already; this method alone may ask
        a judge, a teacher or a reference policy. Validations are scored by the verifier alone. The controller repeats
        a call that raises or takes ten minutes, up to four times, and then ends the run.
        """
        raise NotImplementedError(f"{type(self).__name__} has `columns` {self.columns}, but defines no `score`")

    def trains(self, completion: Completion) -> bool:
        """Whether a completion is trained on: whether loss and mean reward of the group include the completion.

        The group's pass rate includes every completion.
        """
        return self.truncated == "wrong" or not completion.truncated

    def drop_reason(self, group: RolloutGroup) -> str:
        """The reason why a group is left out of the batch, in one word; empty: the group is trained on.

        group: a group reduced to the completions that are trained on (`trains`).

        too_few: no completion, or with `zero_variance` fewer than two, so that there is no spread. all_correct,
        all_incorrect: every completion is correct, or none is. equal_rewards: the rewards are equal although
        correctness differs. A dropped group is not replaced by a new group (section 3.2).
        """
        if len(group.scores) < (2 if self.zero_variance else 1):
            return "too_few"
        if not self.zero_variance or len({score.reward for score in group.scores}) > 1:
            return ""
        correct = {score.correct for score in group.scores}
        if len(correct) > 1:
            return "equal_rewards"
        return "all_correct" if True in correct else "all_incorrect"

    def advantages(self, groups: Sequence[RolloutGroup]) -> Sequence[Sequence[float | Sequence[float]]]:
        """For each group, each completion's advantage: reward less the group's mean, divided by a standard deviation
        (eq. 2).

        The standard deviation is the batch's or the group's, as `normalize` says; with "none" nothing is divided.
        """
        centered = [centered_rewards(group) for group in groups]
        if self.normalize == "none":
            return centered
        if self.normalize == "batch":
            spread = reward_spread(groups)
            return [_divided(values, spread) for values in centered]
        assert self.normalize == "prompt", self.normalize
        return [_divided(values, statistics.pstdev(values)) for values in centered]

    def weights(self, groups: Sequence[RolloutGroup]) -> list[list[float]]:
        """For each completion of each group, the weight of each loss-mask token in the summed loss.

        groups: the groups that remain after filtering; the number of groups is N_eff (section 3.2).
        """
        lengths = [[completion.sampled_tokens for completion in group.completions] for group in groups]
        return token_weights(lengths, self.reduction)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The loss of a micro-batch: the sum of token losses, each times `inputs.token_weights`."""
        return self.paper_loss(inputs)

    @property
    def separable(self) -> bool:
        """Whether the loss is a sum of independent token losses, as the decorator `losses.inputs.separable` says.

        The recipe's loss has to have the decorator, and so has the method `loss` of a subclass that overrides `loss`.
        """
        method = type(self).loss
        return is_separable(self.loss_name) and (method is ScaleRL.loss or getattr(method, "separable", False))

    @cached_property
    def paper_loss(self) -> Loss:
        """The loss function of the recipe (`loss_name`) with `loss_options`. Raises ValueError for an unknown name or
        option."""
        return make_loss(self.loss_name, self.loss_options)


def reward_spread(groups: Sequence[RolloutGroup]) -> float:
    """Standard deviation over all rewards of the groups, each less the group's mean; 0 without rewards."""
    return statistics.pstdev(list(chain.from_iterable(map(centered_rewards, groups))) or [0.0])


def centered_rewards(group: RolloutGroup) -> list[float]:
    """The reward of each completion of the group, less the group's mean. Equal rewards give exact zeros, not the
    mean's rounding error."""
    rewards = [score.reward for score in group.scores]
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def _divided(values: list[float], spread: float) -> list[float]:
    """`values` divided by `spread`. If the spread is 0, every value is 0 and stays 0."""
    return [value / (spread or 1.0) for value in values]

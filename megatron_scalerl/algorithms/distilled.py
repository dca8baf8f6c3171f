"""On-policy distillation: the advantage of a sampled token is the teacher's log-prob less the trainer's.

A token's gradient is the gradient of the reverse KL at the token's position, estimated from the sampled token, on
texts that the policy wrote (Lu and Thinking Machines Lab, "On-Policy Distillation", 2025). The gaps of later tokens
do not enter the advantage of a token. If the teacher fits on the trainer's ranks, `algorithm.kl` computes the KL
exactly, over the whole vocabulary.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_scalerl.algorithms.scalerl import ScaleRL
from megatron_scalerl.losses.inputs import LossInputs, LossOutput, separable
from megatron_scalerl.types import Completion, RolloutGroup


@dataclass(frozen=True, kw_only=True)
class Distilled(ScaleRL):
    """ScaleRL's advantages, times `reward_weight`, less each token's gap to the teacher, times `gap_weight`.

    The gap is log p of the trainer, at the update, less log p of the teacher (nats), without gradient. Forced tokens
    and tokens of an environment have no gap. The importance weight is the ratio of trainer to engine, as in every
    loss, and not of trainer to teacher.
    """

    columns: ClassVar = ("teacher_logprobs",)
    metrics: ClassVar = {"teacher_gap": "mean", "teacher_gap_max": "max"}
    gap_weight: float = 1.0
    reward_weight: float = 0.0

    def trains(self, completion: Completion) -> bool:
        """Whether a completion is trained on: every completion if `reward_weight` is 0, else as ScaleRL decides."""
        return not self.reward_weight or super().trains(completion)

    def drop_reason(self, group: RolloutGroup) -> str:
        """The reason why a group is left out; empty: the group is trained on.

        If `reward_weight` is 0, only an empty group is left out; otherwise ScaleRL's filters decide.
        """
        if self.reward_weight:
            return super().drop_reason(group)
        return "" if group.completions else "too_few"

    @separable
    def loss(self, inputs: LossInputs) -> LossOutput:
        """The recipe's loss with the advantages of this class: weighted rewards less weighted gaps."""
        gap = inputs.trainer_logprobs.detach() - inputs.columns["teacher_logprobs"]
        advantages = self.reward_weight * inputs.advantages - self.gap_weight * gap
        output = super().loss(replace(inputs, advantages=advantages))
        return replace(output, metrics={"teacher_gap": gap, "teacher_gap_max": gap.abs()})

r"""An algorithm of your own: REINFORCE leave-one-out instead of ScaleRL's advantages, with a number of its own.

    source .venv/bin/activate        # after examples/quickstart.sh
    PYTHONPATH=examples megatron-scalerl train recipes/tiny_cpu.yaml name=rloo algorithm=rloo:RLOO steps=20 \
      policy.path=runs/tiny_1/policy prompts.path=runs/tiny_1/prompts.jsonl \
      prompts.held_out_path=runs/tiny_1/held_out.jsonl sft.path=runs/tiny_1/sft.jsonl

The baseline of a completion is the mean reward of the others of its prompt (Ahmadian et al. 2024, arXiv 2402.14740,
eq. 8); nothing is divided, whatever advantages.normalize is. Filters, weights and loss are those of the recipe.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.losses.inputs import separable


@dataclass(frozen=True, kw_only=True)
class RLOO(ScaleRL):
    """Rewards less the mean of the other rewards of the group."""

    metrics: ClassVar = {"positive_share": "mean"}
    scale: float = 1.0
    """algorithm.scale: factor of every advantage."""

    def advantages(self, groups):
        advantages = []
        for group in groups:
            rewards = [score.reward for score in group.scores]
            others = max(len(rewards) - 1, 1)
            advantages.append([self.scale * (r - (sum(rewards) - r) / others) for r in rewards])
        return advantages

    @separable  # a sum of independent token losses, as cispo is
    def loss(self, inputs):
        output = super().loss(inputs)
        return replace(output, metrics={"positive_share": (inputs.advantages > 0).float()})

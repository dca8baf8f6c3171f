"""The planner's figures for one trainer, to compare with a measurement."""

from dataclasses import dataclass

from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import load_family
from megatron_scalerl.plan.hardware import Kernels
from megatron_scalerl.plan.memory import Term, trainer_memory
from megatron_scalerl.plan.sharding import layout_of
from megatron_scalerl.plan.work import token_flops


@dataclass(frozen=True, kw_only=True)
class TrainerPrediction:
    """The fullest rank of a trainer and the FLOPs per token."""

    terms: tuple[Term, ...]
    """Of the peak memory."""
    parameters: int
    """On that rank."""
    model_flops_per_token: float
    """Of the whole policy, forward and backward without recomputation."""
    hardware_flops_per_token: float
    """With recomputation; tokens per second times this over the GPUs' peak is `dense_utilization`."""

    @property
    def total_bytes(self):
        """Peak memory."""
        return sum(term.bytes for term in self.terms)

    @property
    def moving_bytes(self):
        """Temporary memory, of which `fragmentation` is a share."""
        return sum(term.bytes for term in self.terms if term.moving)


def predict_trainer(
    recipe,
    folder,
    *,
    layers,
    device,
    sequence_tokens,
    assumed=None,
):
    """The planner's figures for `recipe.trainer.world_size` ranks that train the policy in `folder`/config.json.

    Micro-batches are full; attention FLOPs are for sequences of `sequence_tokens` (prompt and completion). assumed:
    the planner's defaults if not given. Raises ValueError for what `trainer_memory`, `layout_of`, `load_family` or
    `Kernels` do not support.
    """
    family = load_family(folder)
    layout = layout_of(recipe, family, recipe.trainer.world_size)
    kernels = Kernels(layers=layers, device=device)
    ranks = trainer_memory(recipe, family, layout, assumed or Assumptions(), kernels=kernels)
    flops = token_flops(recipe, family, layout, [sequence_tokens])
    fullest = max(ranks, key=lambda rank: rank.total)
    return TrainerPrediction(
        terms=fullest.terms,
        parameters=fullest.parameters.total,
        model_flops_per_token=flops.model,
        hardware_flops_per_token=flops.hardware(recipe),
    )

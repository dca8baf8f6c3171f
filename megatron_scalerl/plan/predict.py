"""What the planner says of a trainer alone, for a comparison with a measurement of the same recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.plan.counting import load_family
from megatron_scalerl.plan.kernels import Device, Kernels, Layers
from megatron_scalerl.plan.layout import layout_of
from megatron_scalerl.plan.memory import Term, trainer_memory
from megatron_scalerl.plan.work import token_flops
from megatron_scalerl.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class TrainerPrediction:
    """The fullest rank of a trainer, and the work of one token."""

    terms: tuple[Term, ...]
    """Of the peak of memory."""
    parameters: int
    """Of that rank."""
    model_flops_per_token: float
    """Of the whole policy, forward and backward, each weight once."""
    hardware_flops_per_token: float
    """With what is computed again; tokens a second times this over the GPUs' peak is `dense_utilisation`."""

    @property
    def total_bytes(self) -> float:
        """The peak of memory."""
        return sum(term.bytes for term in self.terms)

    @property
    def moving_bytes(self) -> float:
        """What comes and goes with a micro-batch, of which `fragmentation` is a share."""
        return sum(term.bytes for term in self.terms if term.moving)


def predict_trainer(
    recipe: Recipe,
    folder: str | Path,
    *,
    layers: Layers,
    device: Device,
    sequence_tokens: float,
    assumed: Assumptions | None = None,
) -> TrainerPrediction:
    """The plan's figures for `recipe.trainer.world_size` ranks that train the policy of `folder`/config.json.

    `layers` "te" (Transformer Engine) or "plain", `device` "gpu" or "cpu". Micro-batches are full; attention's
    FLOPs are those of sequences of `sequence_tokens` (prompt and completion). Without `assumed` the planner's own.
    Raises ValueError for what cannot be planned: see `trainer_memory`, `layout_of`, `load_family` and `Kernels`.
    """
    family, _ = load_family(folder)
    layout = layout_of(recipe, family, recipe.trainer.world_size)
    kernels = Kernels(layers=layers, device=device)
    ranks = trainer_memory(recipe, family, layout, assumed or Assumptions(), kernels=kernels)
    flops = token_flops(recipe, family, [sequence_tokens])
    fullest = max(ranks, key=lambda rank: rank.total)
    return TrainerPrediction(
        terms=fullest.terms,
        parameters=fullest.parameters.total,
        model_flops_per_token=flops.model,
        hardware_flops_per_token=flops.hardware(recipe),
    )

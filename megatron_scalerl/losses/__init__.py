"""The losses: pure functions from `LossInputs` to `LossOutput`, one per file.

A loss is a sum with given weights. It depends on no recipe, process group or global; to add one, write a file, a
line in LOSSES and its name in `recipe.sections.LossSection`. SEPARABLE tells whether it is a sum over tokens,
`make_loss` which options it takes. Nothing here imports torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_scalerl.losses.cispo import cispo
from megatron_scalerl.losses.dapo import dapo
from megatron_scalerl.losses.grpo import grpo
from megatron_scalerl.losses.gspo import gspo
from megatron_scalerl.losses.inputs import LossInputs, LossOutput

LOSSES: dict[str, Callable[..., LossOutput]] = {"cispo": cispo, "dapo": dapo, "grpo": grpo, "gspo": gspo}
"""Losses by their name in the recipe."""

SEPARABLE = frozenset({"cispo", "dapo", "grpo"})
"""Losses that are a sum of independent token losses, so they can be computed over any part of the tokens. GSPO's
ratio belongs to a whole sequence."""


def make_loss(
    name: str, *, max_is_weight: float, clip_low: float | None = None, clip_high: float | None = None
) -> Callable[[LossInputs], LossOutput]:
    """The loss called `name` with its options bound; a clip of None is the loss's own default.

    Raises ValueError for an unknown name and for a clip given to cispo, which has none.
    """
    if name not in LOSSES:
        raise ValueError(f"loss.name: expected one of {', '.join(LOSSES)}, found {name!r}")
    clips = {key: value for key, value in (("clip_low", clip_low), ("clip_high", clip_high)) if value is not None}
    if name != "cispo":
        return partial(LOSSES[name], **clips)
    if clips:
        raise ValueError(f"loss.{next(iter(clips))}: expected null with loss.name cispo, found {clips}")
    return partial(cispo, max_is_weight=max_is_weight)


__all__ = ["LOSSES", "SEPARABLE", "LossInputs", "LossOutput", "cispo", "dapo", "grpo", "gspo", "make_loss"]

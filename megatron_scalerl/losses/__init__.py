"""The losses: pure functions from `LossInputs` to `LossOutput`, one per file.

A loss is a weighted sum of token losses; the caller gives the weights. A loss reads no recipe, process group or
global variable. To add a loss, write a file and a line in LOSSES. The decorator `separable` marks a loss that is a
sum of independent token losses. A loss may live outside this package, as `module:function`. No file of this package
imports torch at run time.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_scalerl.losses.cispo import cispo
from megatron_scalerl.losses.dapo import dapo
from megatron_scalerl.losses.grpo import grpo
from megatron_scalerl.losses.gspo import gspo
from megatron_scalerl.losses.inputs import LossInputs, LossOutput
from megatron_scalerl.processes.imports import imported

Loss = Callable[..., LossOutput]

LOSSES: dict[str, Loss] = {"cispo": cispo, "dapo": dapo, "grpo": grpo, "gspo": gspo}
"""Losses by their name in the recipe."""


def loss_named(name: str) -> Loss:
    """The loss called `name`, or the function `module:function`. Raises ValueError if no such function exists."""
    if name in LOSSES:
        return LOSSES[name]
    return imported(f"loss.name {name!r}", name, f"{', '.join(LOSSES)} or 'module:function'")


def make_loss(name: str, options: Mapping[str, Any]) -> Callable[[LossInputs], LossOutput]:
    """The loss called `name` with `options` bound; for an option that is None, the default of the loss holds.

    Raises ValueError for an unknown name, an option that the loss does not take, and a missing option.
    """
    loss = loss_named(name)
    stated_options = {key: value for key, value in options.items() if value is not None}
    try:
        signature = inspect.signature(loss)
        _, *names = signature.parameters
        for key in stated_options:
            if key not in names:
                takes = ", ".join(names) or "no option"
                raise ValueError(
                    f"loss.{key} is {stated_options[key]}, but loss.name {name} takes {takes}; leave loss.{key} out"
                )
        signature.bind(None, **stated_options)
    # `signature` raises for an object that cannot be called, `bind` for a missing option without a default.
    except TypeError as error:
        raise ValueError(f"loss.options: loss.name {name} does not take {stated_options} ({error})") from None
    return partial(loss, **stated_options)


def is_separable(name: str) -> bool:
    """Whether a loss is a sum of independent token losses (`inputs.separable`)."""
    return getattr(loss_named(name), "separable", False)


__all__ = ["LOSSES", "LossInputs", "LossOutput", "cispo", "dapo", "grpo", "gspo", "is_separable", "make_loss"]

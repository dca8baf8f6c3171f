"""The algorithm of a run: one object, chosen once by the recipe, that says which completions are trained, and how.

Nothing here imports torch at run time: the controller has the object, too.
"""

import importlib
from typing import Any

from megatron_scalerl.algorithms.scalerl import ScaleRL
from megatron_scalerl.recipe import Recipe

ALGORITHMS: dict[str, type[ScaleRL]] = {"scalerl": ScaleRL}
"""Algorithms by their name in the recipe."""


def algorithm_of(recipe: Recipe) -> ScaleRL:
    """The algorithm of a recipe: its fields have the values of the sections, and the further keys of `algorithm`.

    Raises ValueError, naming the key, for an unknown algorithm, loss or setting.
    """
    section = recipe.algorithm
    chosen = _class_named(section.name)
    paper: dict[str, Any] = dict(
        normalize=recipe.advantages.normalize,
        truncated=recipe.rewards.truncated,
        zero_variance=recipe.filters.zero_variance,
        reduction=recipe.loss.reduction,
        loss_name=recipe.loss.name,
        loss_options=recipe.loss.arguments,
    )
    for name in chosen.columns:
        if not (name.isascii() and name.isidentifier() and len(name) < 64):
            raise ValueError(f"algorithm: {section.name} has a column {name!r}; letters, digits and _ name columns")
    for key in section.settings:
        if key in paper:
            raise ValueError(f"algorithm.{key}: set it in its own section (advantages, filters, loss or rewards)")
    try:
        algorithm = chosen(**paper, **section.settings)
    except TypeError as error:
        raise ValueError(f"algorithm: {section.name} does not take {section.settings} ({error})") from None
    if type(algorithm).loss is ScaleRL.loss:
        algorithm._loss  # noqa: B018 - an unknown loss or option is a mistake of the recipe, found here
    return algorithm


def _class_named(name: str) -> type[ScaleRL]:
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"algorithm.name: {name!r} is neither {', '.join(ALGORITHMS)} nor module:Class")
    try:
        chosen: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"algorithm.name: {name!r} cannot be imported ({error})") from None
    if not (isinstance(chosen, type) and issubclass(chosen, ScaleRL)):
        raise ValueError(f"algorithm.name: {name} is no subclass of megatron_scalerl.algorithms.ScaleRL")
    return chosen


__all__ = ["ALGORITHMS", "ScaleRL", "algorithm_of"]

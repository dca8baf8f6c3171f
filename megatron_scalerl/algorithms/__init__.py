"""The algorithm of a run: one object that says which completions are trained, and how. The recipe chooses it once.

Nothing here imports torch at run time, because the controller, which starts without torch, also makes the object.
"""

from dataclasses import fields
from typing import Any

from megatron_scalerl.algorithms.distilled import Distilled
from megatron_scalerl.algorithms.scalerl import ScaleRL
from megatron_scalerl.processes.imports import imported
from megatron_scalerl.recipe import Recipe


def algorithm_of(recipe: Recipe) -> ScaleRL:
    """The algorithm of a recipe. The fields of the object are set from the recipe: the sections advantages, filters,
    loss and rewards, and the keys of `algorithm`.

    Raises ValueError, naming the key, for an unknown algorithm, loss or setting.
    """
    section = recipe.algorithm
    chosen: Any = {"scalerl": ScaleRL, "distilled": Distilled}.get(section.name)
    if chosen is None:
        head = f"algorithm.name {section.name!r}"
        chosen = imported(head, section.name, "scalerl, distilled or 'module:Class'")
        if not (isinstance(chosen, type) and issubclass(chosen, ScaleRL)):
            raise ValueError(f"{head}: it has to be a subclass of megatron_scalerl.algorithms.ScaleRL")
    paper: dict[str, Any] = dict(
        normalize=recipe.advantages.normalize,
        truncated=recipe.rewards.truncated,
        zero_variance=recipe.filters.zero_variance,
        reduction=recipe.loss.reduction,
        loss_name=recipe.loss.name,
        loss_options=recipe.loss.arguments,
    )
    for key in section.settings:
        if key in paper:
            raise ValueError(f"algorithm.{key}: set this field in the section advantages, filters, loss or rewards")
    settings = dict(section.settings)
    for field in fields(chosen):
        if field.type in (float, "float") and isinstance(settings.get(field.name), str):
            settings[field.name] = _number(f"algorithm.{field.name}", settings[field.name])
    try:
        algorithm: ScaleRL = chosen(**paper, **settings)
    except TypeError as error:
        raise ValueError(f"algorithm: {section.name} does not take {section.settings} ({error})") from None
    algorithm.paper_loss  # noqa: B018 - finds an unknown loss or option of the recipe
    if section.teachers and not (
        isinstance(algorithm, Distilled) and algorithm.columns == Distilled.columns and chosen.score is ScaleRL.score
    ):
        raise ValueError(
            f"algorithm.teachers: {section.name} does not use teachers; use distilled, or a subclass of "
            "megatron_scalerl.algorithms.Distilled that defines neither `columns` nor `score`"
        )
    if section.kl is not None and not algorithm.separable:
        raise ValueError(
            f"algorithm.kl needs a loss of independent tokens; {recipe.loss.name} of {section.name} lacks the mark "
            "for such a loss, the decorator losses.inputs.separable"
        )
    if section.kl is not None and "kl" in algorithm.metrics:
        raise ValueError(f"algorithm.kl writes the metric loss/kl; rename the metric kl of {section.name}")
    return algorithm


def _number(key: str, text: str) -> float:
    """The number that `text` states, since YAML reads 1e-3 as a text. Raises ValueError, naming `key`, for a text
    that is no number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key}: {text!r} is not a number") from None


__all__ = ["Distilled", "ScaleRL", "algorithm_of"]

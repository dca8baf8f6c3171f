"""The algorithm of a run: one object that says which completions are trained, and how. The recipe chooses it once.

Nothing here imports torch at run time, because the controller also has the object.
"""

from dataclasses import fields
from typing import Any

from megatron_scalerl.algorithms.distilled import Distilled
from megatron_scalerl.algorithms.scalerl import ScaleRL
from megatron_scalerl.processes.imports import imported
from megatron_scalerl.recipe import Recipe


def algorithm_of(recipe: Recipe) -> ScaleRL:
    """The algorithm of a recipe. The recipe's sections and the further keys of `algorithm` set the object's fields.

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
            raise ValueError(f"algorithm.{key}: set it in its own section (advantages, filters, loss or rewards)")
    settings = dict(section.settings)
    for field in fields(chosen):
        if field.type in (float, "float") and isinstance(settings.get(field.name), str):
            settings[field.name] = _number(f"algorithm.{field.name}", settings[field.name])
    try:
        algorithm: ScaleRL = chosen(**paper, **settings)
    except TypeError as error:
        raise ValueError(f"algorithm: {section.name} does not take {section.settings} ({error})") from None
    algorithm.paper_loss  # noqa: B018 - an unknown loss or option is a mistake of the recipe, found here
    if section.teachers and not (
        isinstance(algorithm, Distilled) and algorithm.columns == Distilled.columns and chosen.score is ScaleRL.score
    ):
        raise ValueError(
            f"algorithm.teachers: {section.name} has no use for them; it has to be a subclass of "
            "megatron_scalerl.algorithms.Distilled without columns or a score of its own"
        )
    if section.kl is not None and not algorithm.separable:
        raise ValueError(
            f"algorithm.kl needs a loss of independent tokens; {recipe.loss.name} of {section.name} has no such mark "
            "(losses.inputs.separable)"
        )
    if section.kl is not None and "kl" in algorithm.metrics:
        raise ValueError(f"algorithm.kl reports loss/kl, and so does {section.name}; rename the class's number")
    return algorithm


def _number(key: str, text: str) -> float:
    """A number that YAML reads as a text, such as 1e-3."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key}: {text!r} is no number") from None


__all__ = ["Distilled", "ScaleRL", "algorithm_of"]

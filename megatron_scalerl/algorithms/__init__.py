"""The algorithm of a run: one object, chosen once by the recipe, that says which completions are trained, and how.

Nothing here imports torch at run time: the controller has the object, too.
"""

from typing import Any

from megatron_scalerl.algorithms.distilled import Distilled
from megatron_scalerl.algorithms.scalerl import ScaleRL
from megatron_scalerl.processes.imports import imported
from megatron_scalerl.recipe import Recipe


def algorithm_of(recipe: Recipe) -> ScaleRL:
    """The algorithm of a recipe: its fields have the values of the sections, and the further keys of `algorithm`.

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
    try:
        algorithm: ScaleRL = chosen(**paper, **section.settings)
    except TypeError as error:
        raise ValueError(f"algorithm: {section.name} does not take {section.settings} ({error})") from None
    algorithm.paper_loss  # noqa: B018 - an unknown loss or option is a mistake of the recipe, found here
    if section.teachers and not isinstance(algorithm, Distilled):
        raise ValueError(
            f"algorithm.teachers: {section.name} has no use for them; it has to be a subclass of "
            "megatron_scalerl.algorithms.Distilled"
        )
    if section.kl is not None and not algorithm.separable:
        raise ValueError(
            f"algorithm.kl needs a loss of independent tokens; {recipe.loss.name} of {section.name} has no such mark "
            "(losses.inputs.separable)"
        )
    if section.kl is not None and "kl" in algorithm.metrics:
        raise ValueError(f"algorithm.kl reports loss/kl, and so does {section.name}; rename the class's number")
    return algorithm


__all__ = ["Distilled", "ScaleRL", "algorithm_of"]

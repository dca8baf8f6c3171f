"""The recipe of a run: sections and defaults, the constraints between keys, and reading recipe files."""

from megatron_scalerl.recipe.recipe import Recipe

__all__ = ["Recipe"]

"""The recipe of a run: its sections and defaults, the constraints between its keys, and reading recipe files."""

from megatron_scalerl.recipe.recipe import Recipe

__all__ = ["Recipe"]

"""The recipe of a run: its sections and defaults, the file it is read from, and what must hold between its keys."""

from megatron_scalerl.recipe.recipe import Recipe

__all__ = ["Recipe"]

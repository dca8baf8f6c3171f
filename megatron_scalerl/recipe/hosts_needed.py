"""How many hosts a run needs: ranks fill one host after the other, engines follow, and none spans two hosts."""

from __future__ import annotations

from megatron_scalerl.recipe import Recipe


def hosts_needed(recipe: Recipe, slots: int) -> int | None:
    """Hosts with so many devices each that a run needs; None if one engine needs more devices than one host has."""
    each, ranks = recipe.engine.devices_per_engine, recipe.trainer.world_size
    if each > slots:
        return None
    rest = -ranks % slots  # devices that the ranks leave free on the last of their hosts
    engines = max(0, recipe.engine.count - rest // each)
    return -(-ranks // slots) + -(-engines // (slots // each))

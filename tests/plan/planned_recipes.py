"""The project's recipes, and the families of published policies, by name."""

from recipe_files import ROOT

from megatron_scalerl.plan.counting import load_family
from megatron_scalerl.recipe.file import load_recipe

CONFIGS = ROOT / "recipes/configs"


def recipe_of(name, *overrides):
    return load_recipe(ROOT / f"recipes/{name}.yaml", overrides)


def family_of(name):
    return load_family(CONFIGS / name)

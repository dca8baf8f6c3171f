"""Recipes that earlier versions stored, compared with those of this one."""

import yaml
from recipe_files import ROOT

from megatron_scalerl.recipe.file import dump_recipe, load_recipe
from megatron_scalerl.recipe.recipe import Recipe
from megatron_scalerl.recipe.stored import MISSING, completed

FULL = yaml.safe_load(dump_recipe(load_recipe(ROOT / "recipes" / "tiny_cpu.yaml", ["rewards.length_penalty={}"])))


def without(*keys):
    data = yaml.safe_load(yaml.safe_dump(FULL))
    for key in keys:
        section, _, name = key.rpartition(".")
        node = data
        for part in section.split(".") if section else ():
            node = node[part]
        del node[name]
    return data


def test_a_whole_recipe_stays_as_it_is():
    assert completed(FULL) == FULL


def test_keys_and_sections_that_were_added_have_their_defaults():
    added = ("rollouts.schedule", "rollouts.updates_per_phase", "rewards.length_penalty.cache_tokens", "filters")
    assert completed(without(*added)) == FULL
    assert completed(without("rewards.length_penalty"))["rewards"]["length_penalty"] is None


def test_a_key_that_is_missing_may_have_meant_another_value():
    for key, meant in MISSING.items():
        section, name = key.split(".")
        assert Recipe.model_fields[section].default.model_dump()[name] != meant
        assert completed(without(key))[section][name] == meant


def test_old_names_and_unknown_keys():
    old = without("advantages")
    old["advantages"] = {"normalise": "prompt"}
    old["gone"] = 1
    found = completed(old)
    assert found["advantages"] == {"normalize": "prompt"} and found["gone"] == 1


def test_the_tasks_of_a_mixture():
    old = without("prompts.tasks")
    old["prompts"]["tasks"] = {"sums": {"path": "s", "weight": 1.0}}
    assert completed(old)["prompts"]["tasks"]["sums"] | {"path": "s"} == completed(old)["prompts"]["tasks"]["sums"]
    assert completed(old)["prompts"]["tasks"]["sums"]["verifier"] is None

"""Recipes of files and folders, overlays over one base, and the seeds of a job array."""

import pytest
from recipe_files import ROOT

from megatron_scalerl.cluster.submission import recipes_of
from megatron_scalerl.recipe.collection import listed, resolve, resolve_seeds
from megatron_scalerl.recipe.file import RecipeError

TINY, ABLATIONS = ROOT / "recipes" / "tiny_cpu.yaml", ROOT / "recipes" / "ablations"


def test_files_and_folders_are_listed_once():
    items = listed([ABLATIONS / "scalerl.yaml", ABLATIONS, TINY])
    assert [item.name for item in items][:3] == ["scalerl", "dapo_loss", "length_penalty"]
    assert len(items) == len(list(ABLATIONS.glob("*.yaml"))) + 1
    assert [item.overlay for item in items if item.file == TINY] == [False] and all(
        item.overlay for item in items[:-1]
    )


def test_two_files_of_one_name_and_folders_without_recipes_are_refused(tmp_path):
    files = [tmp_path / folder / "x.yaml" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text("loss: {name: dapo}\n")
    with pytest.raises(RecipeError) as refused:
        listed([file.parent for file in files])
    assert str(refused.value) == f"{files[1]}: {files[0]} has the same name; rename one of the files"
    (tmp_path / "none").mkdir()
    with pytest.raises(RecipeError, match=r"none: the folder has no recipes \(\*.yaml\)"):
        listed([tmp_path / "none"])


def test_an_overlay_needs_a_base():
    [item] = listed([ABLATIONS / "dapo_loss.yaml"])
    assert resolve(item, TINY, ["seed=4"]).loss.name == "dapo"
    with pytest.raises(RecipeError, match=r"dapo_loss.yaml: this is an overlay .it lacks name"):
        resolve(item, None)
    assert [(r.name, r.seed) for r in resolve_seeds(item, TINY, [], [1, 2])] == [
        ("tiny_cpu_dapo_loss_seed1", 1),
        ("tiny_cpu_dapo_loss_seed2", 2),
    ]


def test_a_job_array_of_overlays():
    recipes, same = recipes_of(str(ABLATIONS), ["steps=7"], array=True, base=str(TINY), seeds=2)
    assert same == {}
    assert len({recipe.run_dir for recipe in recipes}) == len(recipes) == 2 * len(list(ABLATIONS.glob("*.yaml")))
    assert {recipe.steps for recipe in recipes} == {7}
    with pytest.raises(ValueError, match="name the recipe to which the overlay is applied with --base RECIPE"):
        recipes_of(str(ABLATIONS), [], array=True)
    with pytest.raises(ValueError, match=r"--array: \S*tiny_cpu.yaml is not a folder"):
        recipes_of(str(TINY), [], array=True)


def test_overlays_that_are_the_same_on_a_base_are_one_job(tmp_path):
    recipes, same = recipes_of(str(ABLATIONS), ["policy.dtype=bfloat16"], array=True, base=str(TINY), seeds=2)
    assert same == {"scalerl_bf16": "scalerl"} and len(recipes) == 2 * (len(list(ABLATIONS.glob("*.yaml"))) - 1)
    assert not any("bf16" in recipe.name for recipe in recipes)
    whole = TINY.read_text()  # runs that have names of their own
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(whole.replace("name: tiny_cpu", f"name: {name}"))
    recipes, same = recipes_of(str(tmp_path), [], array=True)
    assert same == {} and [recipe.name for recipe in recipes] == ["a", "b"]

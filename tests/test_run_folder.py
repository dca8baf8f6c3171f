"""A run's folder belongs to one recipe and to one controller at a time."""

import pytest
import yaml

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe_file import RecipeError
from megatron_scalerl.run_folder import RunFolder


def recipe(tmp_path, **changes):
    data = {
        "name": "r",
        "output_dir": str(tmp_path / "runs"),
        "steps": 3,
        "policy": {"path": "p"},
        "prompts": {"path": "q"},
        **changes,
    }
    return Recipe.model_validate(data)


def test_lives_are_counted_and_keep_the_run_id(tmp_path):
    first = RunFolder(recipe(tmp_path))
    first.close()
    second = RunFolder(recipe(tmp_path, steps=9))
    assert (first.run_id, first.incarnation) == (second.run_id, "local.0")
    assert second.incarnation == "local.1"
    assert yaml.safe_load(second.recipe_file.read_text())["steps"] == 9


def test_another_recipe_is_refused_by_its_key(tmp_path):
    RunFolder(recipe(tmp_path)).close()
    with pytest.raises(RecipeError, match=r"loss.name: 'cispo', found 'dapo'"):
        RunFolder(recipe(tmp_path, loss={"name": "dapo"}))


def test_a_folder_in_use_is_refused(tmp_path):
    folder = RunFolder(recipe(tmp_path))
    with pytest.raises(RecipeError, match="found it locked"):
        RunFolder(recipe(tmp_path))
    folder.close()


def test_a_folder_with_other_files_is_refused(tmp_path):
    target = tmp_path / "runs" / "r"
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("mine")
    with pytest.raises(RecipeError, match="expected an empty folder or a run"):
        RunFolder(recipe(tmp_path))

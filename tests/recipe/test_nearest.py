"""Unknown keys: what was meant, by the name that others have for it or the nearest one, else the keys there are."""

import inspect

import pytest
from megatron.core import parallel_state

from megatron_scalerl.engine.options import OURS, vllm_options
from megatron_scalerl.recipe.file import RecipeError, load_recipe, valid_keys
from megatron_scalerl.recipe.other_names import OTHER_NAMES, check_keys, setting_of, unknown_key

MINIMAL = "name: t\nsteps: 3\npolicy: {path: x}\nprompts: {path: y}\n"
LISTED = "; all keys are listed in megatron_scalerl/recipe/sections.py and process_sections.py"
TP = "megatron.parallel.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("optimizer.learning_rate", "; it is set by optimizer.lr"),
        ("trainer.lr", "; it is set by optimizer.lr"),
        ("trainer.tp", f"; it is set by {TP}"),
        ("engine.tensor_parallel_size", "; it is set by engine.vllm.tensor_parallel_size"),
        ("max_tokens", "; it is set by interruption.thinking_tokens and interruption.answer_tokens"),
        ("trainer.thread", "; the nearest is trainer.threads"),
        ("trainer.group_size", "; the nearest is rollouts.group_size"),
        ("trainer.timeout", "; the nearest is trainer.step_timeout_s or trainer.start_timeout_s"),
        ("advantages.gamma", "; keys here: normalize"),
        ("engine.color", LISTED),
    ],
)
def test_a_recipe_says_what_is_meant(tmp_path, key, said):
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    with pytest.raises(RecipeError) as error:
        load_recipe(path, [f"{key}=1"])
    assert str(error.value) == f"{path}: {key} is not a recipe key{said}"


def test_every_other_name_is_of_a_setting_and_of_none_itself_there():
    keywords = set(inspect.signature(parallel_state.initialize_model_parallel).parameters)
    settings = set(valid_keys()) | {f"megatron.parallel.{name}" for name in keywords}
    settings |= {f"engine.vllm.{name}" for name in vllm_options() - OURS.keys()}
    for name, targets in OTHER_NAMES.items():
        for setting in (each for target in targets for each in target.split(" and ")):
            assert setting in settings, (name, setting)
        assert name == name.lower() and name not in settings, "a key of the recipe is not unknown"


def test_other_names_are_read_in_every_spelling():
    assert setting_of("trainer.Learning-Rate") == "optimizer.lr"
    assert setting_of("trainer.color") is None


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ("megatron.parallel", "tp", f"it is set by {TP}"),
        ("engine.vllm", "tp", "it is set by engine.vllm.tensor_parallel_size"),
        ("engine.vllm", "temperatur", "the nearest is temperature"),
    ],
)
def test_options_that_are_passed_on_have_other_names_too(section, key, said):
    with pytest.raises(ValueError) as error:
        check_keys(section, [key], ["temperature", "x"], expected="an option", in_recipe=True)
    assert str(error.value) == f"{section}: {key} is not an option; {said}"


def test_what_is_no_setting_has_no_other_name():
    with pytest.raises(ValueError) as error:
        check_keys("site.yaml", ["tp"], ["account", "qos"], expected="a key of a site file")
    assert str(error.value) == "site.yaml: tp is not a key of a site file; keys here: account, qos"


def test_too_many_keys_are_not_listed_in_the_line():
    many = [f"{letter}_option" for letter in "abcdefghijklm"]
    assert unknown_key("zz", many, expected="a key") == "zz is not a key"
    assert unknown_key("zz", many, expected="a key", listed="FILE") == "zz is not a key; all keys are listed in FILE"
    assert unknown_key("zz", many[:12], expected="a key").endswith("k_option, l_option")
    assert unknown_key("option", many, expected="a key") == "option is not a key", "it is near to all"
    assert unknown_key("zz", [], expected="a key") == "zz is not a key"

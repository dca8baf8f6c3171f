"""Overlays: how they are laid over a recipe, whom an error names, and what each of the paper's rows changes."""

import pytest
import yaml
from recipe_files import OVERLAYS, ROOT, differences

from megatron_scalerl.recipe.file import RecipeError, dump_recipe, load_recipe

TINY, FULL = ROOT / "recipes" / "tiny_cpu.yaml", ROOT / "recipes" / "scalerl_llama3_8b.yaml"
ABLATIONS = {
    "scalerl": {},
    "scalerl_bf16": {"policy.dtype": "bfloat16"},
    "no_fp32_logits": {"policy.dtype": "bfloat16", "policy.logits": "model"},
    "prompt_level_advantages": {"advantages.normalize": "prompt"},
    "length_penalty": {
        "interruption.enabled": False,
        "rewards.length_penalty.max_tokens": None,
        "rewards.length_penalty.cache_tokens": None,
    },
    "zero_variance_kept": {"filters.zero_variance": False},
    "ppo_off_policy_8": {"rollouts.schedule": "ppo_off_policy"},
    "sample_average": {"loss.reduction": "sequence_mean"},
    "uniform_sampling": {"curriculum.no_positive_resampling": None},
    "dapo_loss": {"loss.name": "dapo", "loss.clip_low": 0.2, "loss.clip_high": 0.26},
}
OPEN = {"advantages.normalize": "prompt", "curriculum.no_positive_resampling": None}
"""What the paper leaves open in all of its recipes but ScaleRL."""
DAPO = {"loss.name": "dapo", "loss.clip_low": 0.2, "loss.clip_high": 0.26, "rollouts.groups_per_batch": 80}
PHASES = {"rollouts.schedule": "ppo_off_policy"}
BASELINES = {
    "deepseek_grpo": {
        "loss.name": "grpo",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.2,
        "loss.reduction": "sequence_mean",
        "filters.zero_variance": False,
        "policy.logits": "model",
        **PHASES,
        **OPEN,
    },
    "qwen2_5_dapo": {"policy.logits": "model", **DAPO, **PHASES, **OPEN},
    "magistral": {"policy.logits": "model", **DAPO, **OPEN},
    "minimax_m1": {"rollouts.groups_per_batch": 80, **PHASES, **OPEN},
}
ROWS = [("ablations", name) for name in ABLATIONS] + [("baselines", name) for name in BASELINES]


def overlay(folder, name):
    return ROOT / "recipes" / folder / f"{name}.yaml"


def test_every_file_is_a_row():
    folders = [folder for folder in OVERLAYS if folder != "course"]
    found = {(path.parent.name, path.stem) for folder in folders for path in (ROOT / "recipes" / folder).iterdir()}
    assert found == set(ROWS)


@pytest.mark.parametrize(("folder", "name"), ROWS, ids=[name for _, name in ROWS])
@pytest.mark.parametrize("base", [TINY, FULL], ids=["tiny", "full size"])
def test_a_row_differs_from_the_reference_in_its_keys_alone(base, folder, name):
    expected = {"ablations": ABLATIONS, "baselines": BASELINES}[folder][name]
    if base == FULL:
        expected = {key: value for key, value in expected.items() if key != "policy.dtype"}
    reference = load_recipe(base)
    found = load_recipe(base, [f"overlay={overlay(folder, name)}"])
    assert differences(reference, found) == expected | {"name": f"{reference.name}_{name}"}
    assert found.run_dir != reference.run_dir
    lines = [line for line in overlay(folder, name).read_text().splitlines() if not line.startswith("#")]
    assert 0 < len(lines) <= 15


def test_the_reference_states_what_every_ablation_takes_away():
    stated = yaml.safe_load(overlay("ablations", "scalerl").read_text())
    keys = {f"{section}.{key}" for section, values in stated.items() for key in values}
    taken = {key for name, row in ABLATIONS.items() if name != "scalerl_bf16" for key in row}
    own = {"policy.dtype", "loss.clip_low", "loss.clip_high"}  # options of what replaces an ingredient
    assert {key.replace(".max_tokens", "").replace(".cache_tokens", "") for key in taken} - own == keys - {
        "rollouts.max_staleness_steps",
        "loss.max_is_weight",
    }


def test_without_fp32_logits_a_float32_policy_is_compared_with_one_in_bfloat16():
    reference, ablation = (
        load_recipe(TINY, [f"overlay={overlay('ablations', name)}"]) for name in ("scalerl_bf16", "no_fp32_logits")
    )
    assert load_recipe(TINY).policy.dtype == "float32"
    assert differences(reference, ablation) == {"policy.logits": "model", "name": "tiny_cpu_no_fp32_logits"}


BASE = """name: b
steps: 3
policy: {path: x}
prompts: {path: y}
loss: {name: gspo, clip_low: 0.1}
megatron: {model: {a: 1}}
"""


@pytest.fixture
def files(tmp_path):
    """A recipe and two overlays."""
    for name, text in {
        "base": BASE,
        "one": "loss: {clip_low: null}\nmegatron: {model: {b: 2}}\nrollouts: {group_size: 4}\n",
        "two": "name: own\nrollouts: {group_size: 5}\nmegatron: {model: {a: 3}}\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return {name: tmp_path / f"{name}.yaml" for name in ("base", "one", "two")}


def test_sections_are_merged_and_values_replaced_in_order(files):
    one, two = f"overlay={files['one']}", f"overlay={files['two']}"
    recipe = load_recipe(files["base"], [one])
    assert (recipe.name, recipe.loss.name, recipe.loss.clip_low) == ("b_one", "gspo", None)
    assert (recipe.megatron.model, recipe.rollouts.group_size) == ({"a": 1, "b": 2}, 4)
    recipe = load_recipe(files["base"], [one, two, "rollouts.group_size=6"])
    assert (recipe.name, recipe.megatron.model, recipe.rollouts.group_size) == ("own", {"a": 3, "b": 2}, 6)
    recipe = load_recipe(files["base"], ["rollouts.group_size=6", two, one])
    assert (recipe.name, recipe.megatron.model, recipe.rollouts.group_size) == ("own_one", {"a": 3, "b": 2}, 4)
    assert load_recipe(files["base"], [one, "name=mine"]).name == "mine"


def test_the_resolved_recipe_has_no_overlay_left(files, tmp_path):
    recipe = load_recipe(files["base"], [f"overlay={files['one']}"])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_recipe(recipe))
    assert load_recipe(resolved) == recipe


def test_an_overlay_that_is_not_there_and_a_mistake_in_one(files, tmp_path):
    with pytest.raises(RecipeError, match=r"none.yaml: there is no such file; it should be a recipe file"):
        load_recipe(files["base"], [f"overlay={tmp_path / 'none.yaml'}"])
    files["two"].write_text("loss: {reduction: ppo}\n")
    with pytest.raises(RecipeError, match=r"^\S+base.yaml with \S+two.yaml: loss.reduction is 'ppo'; "):
        load_recipe(files["base"], [f"overlay={files['two']}"])

"""Unknown keys: what was meant, by the name that others have for it or the nearest one, else the keys there are."""

import inspect
import re

import pytest
from megatron.core import parallel_state

from megatron_scalerl.engine.options import OURS, vllm_options
from megatron_scalerl.recipe.file import RecipeError, load_recipe, valid_keys
from megatron_scalerl.recipe.other_names import OTHER_NAMES, check_keys, setting_of, unknown_key

MINIMAL = "name: t\nsteps: 3\npolicy: {path: x}\nprompts: {path: y}\n"
LISTED = "; all keys are listed in megatron_scalerl/recipe/sections.py and process_sections.py"
TP = "megatron.parallel.tensor_model_parallel_size or engine.vllm.tensor_parallel_size"
PP = "megatron.parallel.pipeline_model_parallel_size or engine.vllm.pipeline_parallel_size"
N = "rollouts.group_size or validation.generations or evaluation.generations"
LR = "optimizer.lr or sft.lr"
BATCH = "rollouts.groups_per_batch or sft.batch_size"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("optimizer.learning_rate", f"; it is set by {LR}"),
        ("trainer.tp", f"; it is set by {TP}"),
        ("max_tokens", "; it is set by interruption.thinking_tokens and interruption.answer_tokens"),
        ("trainer.thread", "; the nearest is trainer.threads"),
        ("trainer.group_size", "; the nearest is rollouts.group_size"),
        ("trainer.timeout", "; the nearest is trainer.step_timeout_s"),
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


def test_settings_of_version_0_2_are_those_of_today(tmp_path, caplog):
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    expected = load_recipe(path)
    # as recipe.yaml of a run of version 0.2 has them
    left = "{transaction: streamed, anchor_every: 20, store: '', store_gib: 64.0, link_gb_s: 0.0}"
    path.write_text(MINIMAL + f"weights: {left}\nrewards: {{environment: []}}\ntelemetry: {{trace_steps: null}}\n")
    assert load_recipe(path) == load_recipe(path) == expected
    [said] = caplog.messages
    assert said.startswith(f"{path}: settings of version 0.2: weights.transaction is ignored, weights.anchor_")
    path.write_text(MINIMAL + "rewards: {environment: [A], variables: [B]}\n")
    with pytest.raises(RecipeError, match=r"rewards\.environment is not a recipe key"):
        load_recipe(path)
    path.write_text(MINIMAL + "weights: {transaction: staged}\n")
    with pytest.raises(RecipeError, match=f"^{path}: weights.transaction left with version 0.2: .*; delete the key$"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("former", "successor"),
    [
        ("rewards.environment=[KEY]", "rewards.variables=[KEY]"),
        ("telemetry.trace_steps=[3, 5]", "telemetry.profile_steps=[3, 5]"),
        ("trainer.logit_backend=triton", "trainer.logit_backend=auto"),
        ("trainer.logit_backend=in_place", "trainer.logit_backend=auto"),
        ("checkpoint.rollouts=parquet", "checkpoint.rollouts=keep"),
        ("weights.deltas=ulp", "weights.deltas=absolute"),
    ],
)
def test_a_renamed_setting_works_for_one_more_version(tmp_path, caplog, former, successor):
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    expected = load_recipe(path, [successor])
    assert load_recipe(path, [former]) == expected
    [said] = caplog.messages
    assert said.startswith(f"override {former!r}: settings of version 0.2: {former.partition('=')[0]}")
    section, key = former.partition("=")[0].split(".")
    path.write_text(f"{MINIMAL}{section}: {{{key}: {former.partition('=')[2]}}}\n")
    assert load_recipe(path) == expected


@pytest.mark.parametrize(
    ("override", "own"),
    [
        ("data.max_response_length=1024", "interruption.thinking_tokens and interruption.answer_tokens"),
        ("+data.max_response_length=1024", "interruption.thinking_tokens and interruption.answer_tokens"),
        ("data.train_batch_size=256", BATCH),
        ("data.train_files=a.parquet", "prompts.path"),
        ("data.val_files=[a.parquet]", "prompts.held_out_path"),
        ("algorithm.adv_estimator=grpo", "advantages.normalize"),
        ("actor_rollout_ref.model.path=Qwen/Qwen3-8B", "policy.path"),
        ("actor_rollout_ref.rollout.n=8", N),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.8", "engine.vllm.gpu_memory_utilization"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", TP),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", PP),
        ("actor_rollout_ref.actor.optim.lr=1e-6", LR),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", BATCH),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "loss.clip_high"),
        ("custom_reward_function.path=r.py", "rewards.verifier"),
        ("trainer.n_gpus_per_node=8", "trainer.world_size"),
        ("trainer.save_freq=20", "checkpoint.every_steps"),
    ],
)
def test_an_override_of_verl_names_the_key_here(tmp_path, override, own):
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)
    with pytest.raises(RecipeError) as error:
        load_recipe(path, [override])
    key = override.partition("=")[0]
    assert str(error.value) == f"{path}: {key} is not a recipe key; it is set by {own}"


def test_a_file_of_verl_names_a_key_here_and_a_section_with_a_typing_error_is_named_itself(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL + "actor_rollout_ref: {hybrid_engine: true, rollout: {name: vllm, n: 8}}\n")
    with pytest.raises(
        RecipeError, match=r"actor_rollout_ref\.rollout\.n is not .*; it is set by rollouts\.group_size or .*$"
    ):
        load_recipe(path)
    for given, said in (
        ("optimzer={lr: 1}", "optimzer is not a recipe key; the nearest is optimizer$"),
        ("megatron.paralel={tp: 2}", r"megatron.paralel is not a recipe key; the nearest is megatron\.parallel$"),
        ("colors={red: 1}", "colors.red is not a recipe key"),
        ("colors={}", "colors is not a recipe key"),
    ):
        path.write_text(MINIMAL)
        with pytest.raises(RecipeError, match=said):
            load_recipe(path, [given])


def test_every_other_name_is_of_a_setting_and_of_none_itself_there():
    keywords = set(inspect.signature(parallel_state.initialize_model_parallel).parameters)
    settings = set(valid_keys()) | {f"megatron.parallel.{name}" for name in keywords}
    settings |= {f"engine.vllm.{name}" for name in vllm_options() - OURS.keys()}
    for name, targets in OTHER_NAMES.items():
        assert set(re.split(" and | or ", targets)) <= settings, name
        assert name == name.lower() and name not in settings, "a key of the recipe is not unknown"


def test_other_names_are_read_in_every_spelling():
    assert setting_of("trainer.Learning-Rate") == LR
    assert setting_of("trainer.color") == ""


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ("megatron.parallel", "tp", f"it is set by {TP}"),
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

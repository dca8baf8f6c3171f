"""`plan`, `prompts`, `submit` and `train` refuse the same settings with the same line."""

import shutil

import pytest
from recipe_files import ROOT

from megatron_scalerl.__main__ import main
from megatron_scalerl.plan.settings import check_settings
from megatron_scalerl.recipe.file import load_recipe

PIPELINE = "{pipeline_model_parallel_size: 3, virtual_pipeline_model_parallel_size: 1}"
MISTAKES = [
    ("interruption.thinking_tokens=[4000, 5000]", "max_position_embeddings of the policy: 512 is too short for the"),
    ("prompts.max_prompt_tokens=4096", "; lower a summand, or take a policy with a longer context"),
    ("trainer.micro_batch_tokens=64", "trainer.micro_batch_tokens: 64 is too short for the longest sequence, 91"),
    (
        "engine.vllm.max_model_len=89",
        "engine.vllm.max_model_len: 89 is too short for the longest sequence, 91 tokens",
    ),
    ("engine.vllm.temperature=0.5", "engine.vllm.temperature"),
    ("megatron.optimizer.adam_eps2=1", "megatron.optimizer: adam_eps2 is not a field"),
    ("megatron.parallel.tp=2", "megatron.parallel: tp is not a keyword"),
    ("megatron.model.recompute_granularty=full", "megatron.model: recompute_granularty is not a field"),
    ("megatron.model.fp8=hybrid", "megatron.model.fp8"),
    ("rewards.verifier=maths", "rewards.verifier 'maths'"),
    ("rewards.verifier=json:dump_s", "rewards.verifier 'json:dump_s'"),
    ("environment=json:JSONDecoder", "environment.name 'json:JSONDecoder': the class has no method reset"),
    ("loss.name=cipso", "cipso"),
    ("prompts.think_end=</th\u00efnk>", "prompts.think_end"),
]


def words_of(tiny, tmp_path, override):
    """A recipe with files that exist, and its settings."""
    files = f"policy.path={tiny}/base_policy prompts.path={tiny}/prompts.jsonl"
    given = f"{ROOT}/recipes/tiny_cpu.yaml {files} prompts.held_out_path={tiny}/held_out.jsonl"
    return [*given.split(), f"output_dir={tmp_path / 'runs'}", override]


@pytest.mark.parametrize("override, said", MISTAKES)
def test_four_commands_refuse_a_setting_with_one_line(override, said, tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / "programs").mkdir()
    for name in ("bash", "env", "sh"):
        (tmp_path / "programs" / name).symlink_to(shutil.which(name))
    words = words_of(tiny, tmp_path, override)
    lines = {}
    for command in (["plan", "--gpus", "2", "--check", "--no-build"], ["prompts"], ["train"]):
        assert main([*command, *words]) == 2, command
        lines[command[0]] = capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert said in lines["plan"] and lines["plan"].count("\n") == 1
    assert len(set(lines.values())) == 1, lines
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    job = ["--dry-run", "--partition", "a", "--time", "1-0", "--gpus", "0"]
    assert main(["submit", *job, *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    refused = lines["plan"].removeprefix("megatron-scalerl: ").strip()
    assert f"checks of settings, policy and prompts: not finished on this machine: {refused}" in shown


def test_a_plan_of_another_split_says_what_to_set(capsys):
    words = [str(ROOT / "recipes/qwen3_8b_8gpus.yaml"), "--check", "--no-build", "--gpus"]
    assert main(["plan", *words, "8"]) == 0
    assert "chosen by the planner" not in capsys.readouterr().out
    assert main(["plan", *words, "6"]) == 0
    said = "chosen by the planner, since the recipe's split takes 8 GPUs; set trainer.world_size=4 engine.count=2"
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_folder_with_a_config_alone_is_planned_as_such(tmp_path, capsys):
    words = [str(ROOT / "recipes/qwen3_8b_8gpus.yaml"), "--check", "--no-build", "--gpus", "8"]
    folder = ROOT / "recipes/configs/Qwen3-8B"
    assert main(["plan", *words, f"policy.path={folder}"]) == 2
    assert "tokenizer" in capsys.readouterr().err
    assert main(["plan", *words, f"policy.path={folder}", "--config", str(folder)]) == 0


def test_an_interleaved_pipeline_is_planned_without_a_gpu(tiny):
    paths = [f"policy.path={tiny / 'base_policy'}", f"prompts.path={tiny / 'prompts.jsonl'}"]
    layout = [f"megatron.parallel={PIPELINE}", "trainer.world_size=3", "megatron.model.variable_seq_lengths=true"]
    check_settings(load_recipe(ROOT / "recipes/tiny_cpu.yaml", [*paths, *layout]))


MOONLIGHT = ROOT / "recipes/configs/Moonlight-16B-A3B-Instruct"


@pytest.mark.parametrize(
    "override, said",
    [
        ("policy.lora={}", r"policy\.lora: .*latent attention"),
        ("megatron.model.apply_rope_fusion=true", r"megatron\.model\.apply_rope_fusion: True "),
        ("megatron.model.moe_router_enable_expert_bias=false", r"moe_router_enable_expert_bias: False "),
        ("megatron.model.recompute_modules=[mla_up_proj]", r"megatron\.model\.recompute_modules: mla_up_proj"),
    ],
)
def test_what_latent_attention_has_not_is_refused(override, said):
    merged = ["weights.adapters=merged", override]
    recipe = load_recipe(ROOT / "recipes/moonlight_16b_a3b_8gpus.yaml", merged)
    with pytest.raises(ValueError, match=said):
        check_settings(recipe, MOONLIGHT, planned=True)


@pytest.mark.parametrize(
    "override", ["policy.dtype=float32", "rollouts={deterministic: true, max_staleness_steps: 0}"]
)
def test_adapters_that_engines_on_gpus_do_not_compute_exactly_are_refused_there(override, monkeypatch):
    recipe = load_recipe(ROOT / "recipes/qwen2_5_math_1_5b_lora_24gb.yaml", [override])
    folder = ROOT / "recipes/configs/Qwen2.5-Math-1.5B"
    check_settings(recipe, folder, planned=True)
    monkeypatch.setattr("megatron_scalerl.plan.settings.HAVE_GPU", True)
    with pytest.raises(ValueError, match=r"weights\.adapters: on GPUs .*; set merged"):
        check_settings(recipe, folder, planned=True)


def test_adapters_are_checked_without_a_megatron_section():
    settings = ["megatron.parallel={}", "megatron.model={}", "policy.lora={}", "weights.adapters=merged"]
    recipe = load_recipe(ROOT / "recipes/moonlight_16b_a3b_8gpus.yaml", settings)
    with pytest.raises(ValueError, match=r"policy\.lora: .*latent attention"):
        check_settings(recipe, MOONLIGHT)


def test_only_a_plan_does_without_the_module_of_the_environment(tiny, tmp_path, capsys):
    """`plan`: test_plan_episodes.py."""
    words = words_of(tiny, tmp_path, "environment=nowhere.at_all:Game")
    for command in ("prompts", "train"):
        assert main([command, *words]) == 2
        said = "environment.name 'nowhere.at_all:Game': the module cannot be imported: ModuleNotFoundError: "
        assert capsys.readouterr().err == f"megatron-scalerl: {said}No module named 'nowhere'\n"
    assert not (tmp_path / "runs").exists()

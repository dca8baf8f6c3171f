"""`megatron-scalerl init` writes a recipe that plan, prompts and train take unedited, with a reason at each line."""

import json
import shutil
from pathlib import Path

import pytest
import random_policies
import yaml
from e2e.whole_runs import run
from huggingface_hub import constants

from megatron_scalerl.__main__ import main
from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.plan.settings import check_settings
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.tiny.tokenizer import build_tokenizer, save_tokenizer

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
THINKS = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


@pytest.fixture(autouse=True)
def short_queue(monkeypatch, tmp_path):
    monkeypatch.setattr("megatron_scalerl.plan.planner.COMPLETIONS", 500)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def sums(count):
    return [{"question": f"{n % 10};+{n // 10}=", "answer": str(n % 10 + n // 10)} for n in range(count)]


def messages(count):
    return [
        {"prompt": [{"role": "user", "content": row["question"]}], "reward_model": {"ground_truth": row["answer"]}}
        for row in sums(count)
    ]


def programs(count):
    return [{"prompt": f"Write add{n}.", "answer": f"assert add{n}(1, 1) == {n}"} for n in range(count)]


def file_of(rows, name="data.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def policy_of(name, folder, *, template=None):
    """A shipped config with the tiny tokenizer."""
    Path(folder).mkdir(parents=True)
    shutil.copy(CONFIGS / name / "config.json", folder)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def init(policy, data, *words):
    return main(["init", "--policy", str(policy), "--data", str(data), *map(str, words)])


def written(name="my_run.yaml"):
    return load_recipe(name)


def test_the_recipe_is_for_cpus_where_there_is_no_gpu_and_says_why(tiny, capsys):
    data = file_of(sums(60))
    assert init(tiny / "base_policy", data) == 0
    shown = capsys.readouterr().out
    recipe = written()
    assert (recipe.name, recipe.policy.dtype, recipe.devices) == ("my_run", "float32", 2)
    assert (recipe.prompts.held_out, recipe.prompts.max_prompt_tokens) == (6, 7)
    assert (recipe.prompts.chat_template, recipe.prompts.think_end) == (False, "</think>")
    # 256 tokens where CPUs generate: a seventh is the answer
    assert recipe.interruption.thinking_tokens == (183, 220) and recipe.interruption.answer_tokens == 36
    lines = Path("my_run.yaml").read_text().splitlines()
    values = [line for line in lines if not line.endswith(":") and not line.startswith("#")]
    assert sum("  # " in line for line in values) >= 15
    assert "layout question/answer: question in question, reference in answer" in shown
    following = [line.split()[1] for line in shown.splitlines()[-3:]]
    assert following == ["plan", "prompts", "train"]
    for line in shown.splitlines()[-3:-1]:
        assert main(line.split()[1:]) == 0, line
    capsys.readouterr()
    before = Path("my_run.yaml").read_text()
    assert init(tiny / "base_policy", data, "--gpus", 2) == 2
    assert "my_run.yaml exists; name another file, or overwrite it with --force" in capsys.readouterr().err
    assert Path("my_run.yaml").read_text() == before
    assert init(tiny / "base_policy", data, "--force", "steps=7", "rollouts.group_size=4") == 0
    assert capsys.readouterr().out.endswith("train my_run.yaml steps=7\n")
    assert (written().steps, written().rollouts.group_size) == (7, 4)


@pytest.mark.parametrize(
    ("rows", "verifier", "held_out", "batch"),
    [
        (sums(2), "math", 1, 1),
        (sums(10), "math", 4, 6),
        (sums(99), "math", 9, 8),
        (messages(60), "math", 6, 8),
        (programs(20), "code", 4, 8),
    ],
)
def test_verifier_held_out_prompts_and_batch_follow_from_the_file(rows, verifier, held_out, batch, tiny):
    assert init(tiny / "base_policy", file_of(rows)) == 0
    recipe = written()
    assert recipe.rewards.verifier == verifier
    assert (recipe.prompts.held_out, recipe.rollouts.groups_per_batch) == (held_out, batch)
    assert main(["prompts", "my_run.yaml", "--count", "1"]) == 0


@pytest.mark.parametrize(
    ("policy", "gpus", "gpu", "layout"),
    [
        ("Qwen2.5-Math-1.5B", 1, "h100-80g", (1, 1, {}, True)),
        ("Qwen2.5-Math-1.5B", 3, "h100-80g", (1, 2, {}, False)),
        ("Qwen3-8B", 4, "h200", (2, 2, {"tensor_model_parallel_size": 2}, False)),
        ("Qwen3-30B-A3B", 16, "h200", (8, 8, {"expert_model_parallel_size": 8}, False)),
    ],
)
def test_the_layout_fits_the_gpus_by_the_planner(policy, gpus, gpu, layout, capsys):
    folder = policy_of(policy, "policy")
    assert init(folder, file_of(sums(90)), "--gpus", gpus, "--gpu", gpu) == 0
    recipe = written()
    parallel = recipe.megatron.parallel
    assert (recipe.trainer.world_size, recipe.engine.count, parallel, recipe.engine.colocate) == layout
    assert recipe.policy.dtype == "bfloat16" and recipe.devices == gpus
    settings = check_settings(recipe)
    positions = json.loads((CONFIGS / policy / "config.json").read_text())["max_position_embeddings"]
    paper = recipe.prompts.max_prompt_tokens + 14_336 + 3
    assert settings.longest_sequence == min(positions, paper)
    capsys.readouterr()
    assert main(["plan", "my_run.yaml", "--gpus", str(gpus), "--gpu", gpu, "--check"]) == 0
    shown = capsys.readouterr().out
    assert "fits: " in shown and "chosen by the planner" not in shown


def test_an_environment_is_written_with_its_keys_and_checked(tiny, monkeypatch, capsys):
    monkeypatch.syspath_prepend(CONFIGS.parents[1] / "examples")
    given = ("environment=calculator:Calculator", "environment.max_turns=3")
    assert init(tiny / "base_policy", file_of(sums(10)), *given) == 0
    assert (written().environment.name, written().environment.max_turns) == ("calculator:Calculator", 3)
    assert init(tiny / "base_policy", "data.jsonl", "--out", "other.yaml", "environment=calculator:Abacus") == 2
    assert "environment.name 'calculator:Abacus': calculator has no Abacus" in capsys.readouterr().err
    assert not Path("other.yaml").exists()


def test_a_template_is_taken_for_messages_and_thinking_is_closed_as_it_says():
    folder = policy_of("Qwen3-8B", "policy", template=THINKS)
    assert init(folder, file_of(messages(20)), "--gpus", 0) == 0
    prompts = written().prompts
    assert (prompts.chat_template, prompts.think_start, prompts.think_end) == (True, "<think>", "</think>")


@pytest.mark.parametrize(
    ("config", "rows", "words", "said"),
    [
        ({}, sums(30), ["--gpus", 1], "fits 1 x NVIDIA H100 SXM 80 GB; 8 would do"),
        ({}, sums(30), ["--gpus", -1], "--gpus: -1 is no number of GPUs; 0 stands for CPUs"),
        ({}, sums(1), [], "one prompt is too few to train on one and to validate on another"),
        ({"max_position_embeddings": 20}, sums(30), [], "20 positions leave 10 tokens for a completion, after"),
        ({"model_type": "gpt2"}, sums(30), [], "model_type 'gpt2' is not supported: it has"),
        ({}, [{"text": "a", "label_x": "b"}] * 3, [], "no known layout has its columns, text, label_x"),
        ({}, sums(30), ["engine.vllm={max_num_seq: 8}"], "max_num_seq is not an option of vLLM"),
        ({}, sums(30), ["rollouts.group_sise=8"], "group_sise"),
        ({}, sums(30), ["--policy", "no/where"], "no/where is not a Hugging Face folder"),
        ({}, sums(30), ["--data", "none.jsonl"], "none.jsonl: there is no such file or folder of prompts"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_no_file(config, rows, words, said, capsys):
    folder = policy_of("Qwen3-8B", "policy")
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert init(folder, file_of(rows), *words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not Path("my_run.yaml").exists()


def test_a_column_that_is_given_is_written_and_read(tiny):
    rows = [{"text": row["question"], "gold": row["answer"]} for row in sums(30)]
    words = ["prompts.prompt_column=text", "prompts.answer_column=gold"]
    assert init(tiny / "base_policy", file_of(rows), *words) == 0
    assert yaml.safe_load(Path("my_run.yaml").read_text())["prompts"]["answer_column"] == "gold"
    assert main(["prompts", "my_run.yaml", "--count", "1"]) == 0


def test_names_on_the_hub_stay_names(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("models--Qwen--Qwen3-8B", "datasets--my--sums"):
        (tmp_path / name / "refs").mkdir(parents=True)
        (tmp_path / name / "refs" / "main").write_text("0" * 40)
    policy_of("Qwen3-8B", tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / ("0" * 40))
    (tmp_path / "datasets--my--sums" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    file_of(sums(30), tmp_path / "datasets--my--sums" / "snapshots" / ("0" * 40) / "train.jsonl")
    assert init("Qwen/Qwen3-8B", "my/sums") == 0
    data = yaml.safe_load(Path("my_run.yaml").read_text())
    assert (data["policy"]["path"], data["prompts"]["path"]) == ("Qwen/Qwen3-8B", "my/sums")
    assert main(["prompts", "my_run.yaml", "--count", "1"]) == 0


@pytest.mark.slow
def test_init_plan_prompts_train_with_nothing_edited(tmp_path):
    """A random policy of another family and rows of messages: answers of one digit, which it sometimes hits."""
    random_policies.make("qwen2", tmp_path / "policy", **random_policies.QWEN2_FOR_ENGINES)
    save_tokenizer(tmp_path / "policy")
    file_of(messages(60), tmp_path / "data.jsonl")
    command = ("-m", "megatron_scalerl")
    recipe = tmp_path / "my_run.yaml"
    given = ("--policy", tmp_path / "policy", "--data", tmp_path / "data.jsonl", "--out", recipe)
    run(*command, "init", *given, f"output_dir={tmp_path}")
    assert "fits" in run(*command, "plan", recipe, "--gpus", 2, "--check").stdout
    run(*command, "prompts", recipe)
    run(*command, "train", recipe, "steps=2")
    steps = [row["step"] for row in read_jsonl(tmp_path / "my_run" / "metrics.jsonl") if "skipped" not in row]
    assert steps == [1, 2]

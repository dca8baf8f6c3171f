"""`megatron-scalerl init` writes a recipe that plan, prompts and train take unedited, with a reason at each line."""

import json
import shutil
from pathlib import Path

import pytest
import random_policies
import yaml
from command_line import refusal
from e2e.whole_runs import run
from huggingface_hub import constants
from json_lines import write

from megatron_scalerl.__main__ import main
from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.commands.init import _with_overrides
from megatron_scalerl.plan.settings import check_settings
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.tiny.tokenizer import build_tokenizer, save_tokenizer

CONFIGS = Path(__file__).parents[2] / "recipes/configs"
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
    return write(Path(name), rows)


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


def recipe_of(policy, rows, *words):
    """The recipe that is written for these rows."""
    assert init(policy, file_of(rows), *words) == 0
    return load_recipe("my_run.yaml")


def test_the_recipe_is_for_cpus_where_there_is_no_gpu_and_says_why(tiny, capsys):
    recipe = recipe_of(tiny / "base_policy", sums(60))
    shown = capsys.readouterr().out
    assert (recipe.name, recipe.policy.dtype, recipe.devices) == ("my_run", "float32", 2)
    assert (recipe.prompts.held_out, recipe.prompts.max_prompt_tokens) == (15, 38)
    assert (recipe.prompts.chat_template, recipe.prompts.think_end) == (False, "")
    # 256 tokens where CPUs generate: a seventh is the answer
    assert recipe.interruption.thinking_tokens == (183, 220) and recipe.interruption.answer_tokens == 36
    lines = Path("my_run.yaml").read_text().splitlines()
    values = [line for line in lines if not line.endswith(":") and not line.startswith("#")]
    assert sum("  # " in line for line in values) >= 20
    assert "layout question/answer: question in question, reference in answer" in shown
    following = [line.split()[1] for line in shown.splitlines()[-3:]]
    assert following == ["plan", "prompts", "train"]
    for line in shown.splitlines()[-3:-1]:
        assert main(line.split()[1:]) == 0, line
    capsys.readouterr()
    before = Path("my_run.yaml").read_text()
    assert init(tiny / "base_policy", "data.jsonl", "--gpus", 2) == 2
    assert "my_run.yaml exists; name another file, or overwrite it with --force" in capsys.readouterr().err
    assert Path("my_run.yaml").read_text() == before
    given = ("steps=7", "rollouts.group_size=4", "engine.vllm.max_num_seqs=3", "engine.vllm.block_size=32")
    recipe = recipe_of(tiny / "base_policy", sums(60), "--force", *given)
    assert capsys.readouterr().out.endswith("train my_run.yaml steps=7\n")
    assert (recipe.steps, recipe.rollouts.group_size) == (7, 4)
    assert recipe.engine.vllm.items() >= {"max_num_seqs": 3, "block_size": 32}.items()


def test_a_nested_setting_joins_what_was_chosen_and_a_mapping_replaces_it():
    chosen = {"megatron.parallel": ({"tensor_model_parallel_size": 4}, "the smallest groups that fit")}
    both = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    for given, settings in (
        ("megatron.parallel.pipeline_model_parallel_size=2", both),
        ("megatron.parallel={pipeline_model_parallel_size: 2}", {"pipeline_model_parallel_size": 2}),
    ):
        assert _with_overrides(chosen, [given]) == {"megatron.parallel": (settings, "as given")}
    assert chosen["megatron.parallel"][0] == {"tensor_model_parallel_size": 4}


@pytest.mark.parametrize(
    "rows, verifier, held_out, batch",
    [
        (sums(2), "math", 1, 1),
        (sums(10), "math", 4, 6),
        (sums(99), "math", 24, 8),
        (messages(60), "math", 15, 8),
        (programs(20), "code", 5, 8),
    ],
)
def test_verifier_held_out_prompts_and_batch_follow_from_the_file(rows, verifier, held_out, batch, tiny):
    recipe = recipe_of(tiny / "base_policy", rows)
    assert recipe.rewards.verifier == verifier
    assert (recipe.prompts.held_out, recipe.rollouts.groups_per_batch) == (held_out, batch)
    assert main(["prompts", "my_run.yaml", "--count", "1"]) == 0


@pytest.mark.parametrize(
    "policy, gpus, gpu, layout",
    [
        ("Qwen2.5-Math-1.5B", 1, "h100-80g", (1, 1, {}, True)),
        ("Qwen2.5-Math-1.5B", 3, "h100-80g", (1, 2, {}, False)),
        ("Qwen3-8B", 4, "h200", (2, 2, {"tensor_model_parallel_size": 2}, False)),
        ("Qwen3-30B-A3B", 16, "h200", (8, 8, {"expert_model_parallel_size": 8}, False)),
    ],
)
def test_the_layout_fits_the_gpus_by_the_planner(policy, gpus, gpu, layout, capsys):
    folder = policy_of(policy, "policy")
    recipe = recipe_of(folder, sums(90), "--gpus", gpus, "--gpu", gpu)
    parallel = recipe.megatron.parallel
    assert (recipe.trainer.world_size, recipe.engine.count, parallel, recipe.engine.colocate) == layout
    assert recipe.policy.dtype == "bfloat16" and recipe.devices == gpus
    settings = check_settings(recipe)
    positions = json.loads((CONFIGS / policy / "config.json").read_text())["max_position_embeddings"]
    paper = recipe.prompts.max_prompt_tokens + 14_336
    assert settings.longest_sequence == min(positions - 1, paper)
    capsys.readouterr()
    assert main(["plan", "my_run.yaml", "--gpus", str(gpus), "--gpu", gpu, "--check"]) == 0
    shown = capsys.readouterr().out
    assert "fits: " in shown and "chosen by the planner" not in shown


def test_an_environment_is_written_with_its_keys_and_checked(tiny, monkeypatch, capsys):
    monkeypatch.syspath_prepend(CONFIGS.parents[1] / "examples")
    given = ("environment=calculator:Calculator", "environment.max_turns=3")
    section = recipe_of(tiny / "base_policy", sums(10), *given).environment
    assert (section.name, section.max_turns) == ("calculator:Calculator", 3)
    assert init(tiny / "base_policy", "data.jsonl", "--out", "other.yaml", "environment=calculator:Abacus") == 2
    assert "environment.name 'calculator:Abacus': calculator has no Abacus" in capsys.readouterr().err
    assert not Path("other.yaml").exists()


def test_a_template_is_taken_for_messages_and_thinking_is_closed_as_it_says():
    folder = policy_of("Qwen3-8B", "policy", template=THINKS)
    prompts = recipe_of(folder, messages(20), "--gpus", 0).prompts
    assert (prompts.chat_template, prompts.think_start, prompts.think_end) == (True, "<think>", "</think>")


@pytest.mark.parametrize(
    "config, rows, words, said",
    [
        (
            {},
            sums(30),
            ["--gpus", 1],
            "fits 1 x NVIDIA H100 SXM 80 GB; settings that fit: policy.lora={} interruption.thi",
        ),
        ({}, sums(30), ["--gpus", -1], "--gpus: -1 is not a number of GPUs; use 0 for a run"),
        ({}, sums(1), [], "1 usable prompts are too few to train and to validate on"),
        ({"max_position_embeddings": 20}, sums(30), [], "20 positions leave 9 tokens for a completion, after"),
        ({"model_type": "gpt2"}, sums(30), [], "model_type 'gpt2' is not supported: the model has"),
        ({}, [{"text": "a", "label_x": "b"}] * 3, [], "no known layout fits the columns text, label_x"),
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
    assert said in refusal(["init", "--policy", folder, "--data", file_of(rows), *words], capsys)
    assert not Path("my_run.yaml").exists()


@pytest.mark.parametrize("path", ["models", "models/policy.Q4_1.gguf", "models/not_here.gguf"])
def test_a_gguf_file_as_a_policy_says_how_it_is_converted(path, capsys):
    Path("models").mkdir()
    Path("models/policy.Q4_1.gguf").write_bytes(b"GGUF")
    data = file_of(sums(30))
    recipe = file_of([{"name": "r", "steps": 1, "policy": {"path": path}, "prompts": {"path": data}}], "r.yaml")
    for words in (
        f"init --policy {path} --data {data}",
        f"plan {recipe} --gpus 1",
        f"train {recipe}",
        f"convert to-megatron {path} out",
    ):
        line = refusal(words.split(), capsys)
        assert "no config.json" in line and "docs/checkpoints.md#gguf" in line, words


def test_a_column_that_is_given_is_written_and_read(tiny):
    rows = [{"text": row["question"], "gold": row["answer"]} for row in sums(30)]
    words = ["prompts.prompt_column=text", "prompts.answer_column=gold"]
    assert recipe_of(tiny / "base_policy", rows, *words).prompts.answer_column == "gold"
    assert main(["prompts", "my_run.yaml", "--count", "1"]) == 0


def test_names_on_the_hub_stay_names(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("models--Qwen--Qwen3-8B", "datasets--my--sums"):
        (tmp_path / name / "refs").mkdir(parents=True)
        (tmp_path / name / "refs/main").write_text("0" * 40)
    policy_of("Qwen3-8B", tmp_path / "models--Qwen--Qwen3-8B/snapshots" / ("0" * 40))
    (tmp_path / "datasets--my--sums/snapshots" / ("0" * 40)).mkdir(parents=True)
    file_of(sums(30), tmp_path / "datasets--my--sums/snapshots" / ("0" * 40) / "train.jsonl")
    assert init("Qwen/Qwen3-8B", "my/sums") == 0
    data = yaml.safe_load(Path("my_run.yaml").read_text())
    assert (data["policy"]["path"], data["prompts"]["path"]) == ("Qwen/Qwen3-8B", "my/sums")
    assert main(["prompts", "my_run.yaml", "--count", "1"]) == 0


def test_what_nothing_tells_is_written_both_ways(tiny):
    """The tokenizer has a template without end tokens, and tags that nothing says the policy writes."""
    recipe_of(tiny / "base_policy", sums(60))
    other = Path("my_run.yaml").read_text()
    for taken, line in (
        ("chat_template: false", "chat_template: true"),
        ('think_start: ""', 'think_start: "<think>"'),
        ('think_end: ""', 'think_end: "</think>"'),
        ("enabled: false", "enabled: true"),
    ):
        assert f"  {taken}" in other and f"  # {line}" in other
        other = other.replace(f"  {taken}", f"  # {taken}").replace(f"  # {line}", f"  {line}")
    Path("other.yaml").write_text(other)
    prompts = load_recipe("other.yaml").prompts
    assert (prompts.chat_template, prompts.think_start, prompts.think_end) == (True, "<think>", "</think>")
    assert main(["prompts", "other.yaml", "--count", "1"]) == 0
    # the warm start tells of the tags, the user of the template
    given = [f"sft.path={tiny / 'sft.jsonl'}", "prompts.chat_template=false"]
    recipe = recipe_of(tiny / "base_policy", sums(60), "--force", *given)
    assert (recipe.prompts.think_end, recipe.interruption.enabled) == ("</think>", True)
    assert "  # chat_template:" not in Path("my_run.yaml").read_text()
    assert "  # think_end:" not in Path("my_run.yaml").read_text()


TUNED = "{% for m in messages %}{{ m.content }}{% if m.role != 'user' %}<eos>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "policy, gpus, given, lr, warm_up, staleness, temperature, longest",
    [
        # 5e-7 x sqrt(8.03 / 1.54 billion parameters), the paper's from 8 billion on
        ("Qwen2.5-Math-1.5B", 3, [], 1.1e-6, 10, 8, 1.0, 4089),
        ("Qwen3-8B", 8, ["steps=1000"], 5e-7, 50, 8, 1.0, 14_336),
        ("Qwen3-30B-A3B", 16, ["steps=4000", "optimizer.lr=1e-6"], 1e-6, 100, 8, 1.0, 14_336),
        ("Qwen2.5-Math-1.5B", 0, ["steps=7"], 1.1e-6, 1, 1, 1.0, 64),
        ("small", 0, ["rollouts.temperature=0.9"], 4.1e-6, 10, 1, 0.9, 64),
        ("small", 0, [], 4.1e-6, 10, 1, 0.7, 64),
        ("small", 0, ["policy.lora.rank=8", "weights.adapters=merged"], 4.1e-5, 10, 1, 0.7, 64),
    ],
)
def test_a_first_run_learns_is_forecast_and_is_saved(
    policy, gpus, given, lr, warm_up, staleness, temperature, longest
):
    name = "Qwen3-8B" if policy == "small" else policy
    folder = policy_of(name, "policy", template=TUNED)
    if policy == "small":  # 118 million parameters
        change = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "vocab_size": 23_000}
        change |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "eos_token_id": 2}
        file = Path(folder, "config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    recipe = recipe_of(folder, sums(90), "--gpus", gpus, "--gpu", "h200", *given)
    assert (recipe.optimizer.lr, recipe.optimizer.warmup_steps) == (lr, warm_up)
    assert (recipe.rollouts.max_staleness_steps, recipe.rollouts.temperature) == (staleness, temperature)
    assert recipe.max_completion_tokens == longest
    section = recipe.validation
    assert (section.prompts, section.generations, section.end_generations) == (22, 6, 24)
    assert section.every_steps == recipe.forecast.fit_from_steps == max(1, recipe.steps // 25)
    assert recipe.checkpoint.every_steps == max(1, recipe.steps // 10)
    unit = "GPU-hours" if gpus else "s a step"
    assert unit in Path("my_run.yaml").read_text().splitlines()[1]


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
    assert "fits" in run(*command, "plan", recipe, "--gpus", 0, "--check").stdout
    run(*command, "prompts", recipe)
    run(*command, "train", recipe, "steps=2")
    steps = [row["step"] for row in read_jsonl(tmp_path / "my_run/metrics.jsonl") if "skipped" not in row]
    assert steps == [1, 2]

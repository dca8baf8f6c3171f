"""Recipes for one and two nodes, run: their policies of other widths, two steps, on as many ranks as two cores bear.

Whatever a recipe says stays, besides what `SMALLER` and its row of `RECIPES` name.
"""

import json
import random
from pathlib import Path

import pytest
import random_policies
from json_lines import write
from recipe_files import ROOT
from transformers import AutoConfig
from whole_runs import product, words

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.tiny.tokenizer import MODEL_VOCABULARY, build_tokenizer

pytestmark = pytest.mark.full

RECIPES = {
    "qwen2_5_math_1_5b": ("problem", ()),
    "qwen2_5_math_1_5b_1gpu": ("problem", ("engine.vllm.gpu_memory_utilization=0.01",)),
    "qwen3_8b_8gpus": ("verl", ("trainer.world_size=2", "megatron.model.recompute_num_layers=1")),
    "qwen3_30b_a3b_16gpus": ("verl", ("trainer.world_size=4", "megatron.parallel.expert_model_parallel_size=2")),
}
"""Recipe -> layout of its prompts, settings that two cores need: as many ranks as TP 2, and PP 2 x EP 2, take."""
SMALLER = words("""
    steps=2 engine.count=1 rewards.verifier=coin:toss rewards.truncated=wrong rewards.workers=1
    prompts.max_prompt_tokens=512 prompts.held_out=4
    validation.every_steps=2 validation.prompts=4 validation.generations=1
    rollouts.groups_per_batch=4 rollouts.group_size=8 rollouts.max_in_flight=32
    interruption.thinking_tokens=[12,16] interruption.answer_tokens=24 trainer.micro_batch_tokens=1024
    engine.vllm.kv_cache_memory_bytes=134217728 weights.probe_every=1 optimizer.warmup_steps=1
""")
WIDTHS = dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=48, num_attention_heads=2)
WIDTHS |= dict(num_key_value_heads=2, head_dim=32, num_hidden_layers=4, max_window_layers=4, num_experts=8)
WIDTHS |= dict(vocab_size=MODEL_VOCABULARY, bos_token_id=1, eos_token_id=2)
MISMATCH = 0.1
"""Largest |trainer - engine log-prob| on the probe (nats) in bf16, as the recipes say; runs have 0.015 to 0.03."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
THINKING = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


def make_policy(recipe, folder):
    """The recipe's policy as it is published, but of other widths, with random weights and the tiny tokenizer."""
    published = ROOT / "recipes/configs" / Path(recipe.policy.path).name / "config.json"
    settings = json.loads(published.read_text())
    settings |= {key: value for key, value in WIDTHS.items() if key in settings}
    random_policies.save(AutoConfig.for_model(**settings), folder, std=0.1)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE + THINKING * bool(recipe.prompts.template_arguments)
    tokenizer.save_pretrained(folder)


def make_prompts(layout, file):
    rng = random.Random(1)
    problems = [f"{rng.randint(100, 999)}+{rng.randint(100, 999)}=" for _ in range(40)]
    rows = [{"problem": problem, "solution": "It is $\\boxed{3}$."} for problem in problems]
    if layout == "verl":
        rows = [
            {"prompt": [{"role": "user", "content": problem}], "reward_model": {"ground_truth": "3"}}
            for problem in problems
        ]
    file.parent.mkdir()
    write(file, rows)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_its_kind_of_policy(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    layout, more = RECIPES[name]
    file = ROOT / f"recipes/{name}.yaml"
    recipe = load_recipe(file)
    make_policy(recipe, tmp_path / "policy")
    make_prompts(layout, tmp_path / "prompts/train.jsonl")
    paths = [f"policy.path={tmp_path / 'policy'}", f"prompts.path={tmp_path / 'prompts'}", f"output_dir={tmp_path}"]
    product("train", file, "name=run", *paths, *SMALLER, *more)
    rows = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "skipped" not in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 and row["probe_mismatch_max"] <= MISMATCH for row in rows)
    held = {row["devices"] for row in read_jsonl(tmp_path / "run/ledger.jsonl") if "heartbeat" in row}
    assert held == {load_recipe(tmp_path / "run/recipe.yaml").devices}

"""RL steps with every family: trainer ranks, a real engine, live updates; both sides compute the same log-probs."""

import random
from pathlib import Path

import pytest
import random_policies
from json_lines import write
from safetensors.torch import load_file
from sampling import sampled
from torch import equal
from whole_runs import overrides, product

from megatron_scalerl.checkpoints.jsonl import read_jsonl

pytestmark = pytest.mark.slow

EP2 = ("trainer.world_size=2", "megatron.parallel.expert_model_parallel_size=2")
LATENT = ("engine.vllm.attention_backend=CPU_MLA",)
UNSCALED = ('engine.vllm.compilation_config={"custom_ops": ["-rotary_embedding"]}',)
"""vLLM 0.32's kernel on CPUs turns the rotary part of such queries wrongly where RoPE has no scaling."""
FAMILIES = {
    "kimi": (random_policies.LATENT_FOR_ENGINES, 40, (*EP2, *LATENT)),
    "deepseek": (random_policies.LATENT_FOR_ENGINES, 40, (*EP2, *LATENT)),
    "moonlight": (random_policies.LATENT_FOR_ENGINES | {"rms_norm_eps": 1e-3}, 40, (*EP2, *LATENT, *UNSCALED)),
    "llama_biased": (random_policies.FOR_ENGINES, 40, ()),
    "mistral": (random_policies.FOR_ENGINES, 40, ()),
    "olmo2": (random_policies.QWEN2_FOR_ENGINES, 40, ()),
    "qwen2": (random_policies.QWEN2_FOR_ENGINES, 40, ()),
    "qwen2_tied": (random_policies.QWEN2_FOR_ENGINES, 40, ()),
    "qwen3_tied": (random_policies.FOR_ENGINES, 40, ()),
    "qwen3_moe": (random_policies.FOR_ENGINES, 40, EP2),
    "qwen3_moe_tied": (random_policies.FOR_ENGINES, 40, EP2),
    "smollm3": (random_policies.QWEN2_FOR_ENGINES, 40, ()),
    "seed_oss": (random_policies.FOR_ENGINES, 40, ()),
    "ernie4_5": (random_policies.FOR_ENGINES, 40, ()),
    "exaone4": (random_policies.FOR_ENGINES, 40, ()),
    "flash": (random_policies.LATENT_FOR_ENGINES, 40, (*EP2, *LATENT, *UNSCALED)),
    "glm4_moe": (random_policies.FOR_ENGINES, 40, EP2),
    "mixtral": (random_policies.FOR_ENGINES, 40, ()),
    "olmoe": (random_policies.QWEN2_FOR_ENGINES, 40, ()),
    "dots1": (random_policies.QWEN2_FOR_ENGINES, 40, ()),
    "llama4_tied": (random_policies.LLAMA4_FOR_ENGINES, 300, EP2),
}
"""Kind -> its settings, length of the prompts (tokens), layout. Llama 4 is past its second chunk, and past
the fourth step of its attention temperature."""


def make_run(kind, folder):
    """A random policy with the tiny tokenizer, and prompts of random digits."""
    from megatron_scalerl.tiny.tokenizer import save_tokenizer

    settings, length, _ = FAMILIES[kind]
    random_policies.make(kind, folder / "policy", **settings)
    save_tokenizer(folder / "policy")
    rng = random.Random(1)
    for name, count in (("prompts", 40), ("held_out", 8)):
        rows = [{"prompt": "".join(rng.choices("0123456789+-", k=length)), "answer": "0"} for _ in range(count)]
        write(folder / f"{name}.jsonl", rows)


def train(kind, tmp_path, *more, **keywords):
    _, length, layout = FAMILIES[kind]
    own = f"""steps=2 prompts.max_prompt_tokens={length + 20} rewards.verifier=coin:toss rewards.truncated=wrong
        interruption.answer_tokens=40 validation.every_steps=0 optimizer.lr=1e-2 trainer.micro_batch_tokens=1024"""
    settings = overrides(tmp_path, tmp_path, "run", *own.split(), *layout, *more)
    return product("train", "recipes/tiny_cpu.yaml", *settings, **keywords)


@pytest.mark.parametrize("kind", sampled("family", FAMILIES, 1))
def test_two_steps_with_a_real_engine(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    make_run(kind, tmp_path)
    train(kind, tmp_path)
    records = [record for record in read_jsonl(tmp_path / "run/metrics.jsonl") if "skipped" not in record]
    assert [record["step"] for record in records] == [1, 2]
    # completions of the first step came from the weights that trainer and engine started with
    assert records[0]["mismatch_max"] <= 1e-4
    # and the probe from those that the engine got after every step
    assert all(record["probe_mismatch_max"] <= 1e-4 and record["grad_norm"] > 0 for record in records)
    if not set(EP2) <= set(FAMILIES[kind][2]):
        return
    product("export", tmp_path / "run", "--out", tmp_path / "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "policy", tmp_path / "hf"))
    assert before.keys() == after.keys()
    for name in before:
        assert equal(before[name], after[name]) == name.endswith("e_score_correction_bias"), name

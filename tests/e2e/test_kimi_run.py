"""RL steps on a tiny policy with Kimi-K2's config.json: live updates, a checkpoint, and its export in three programs.

Why this matters: engines and transformers read `kimi_k2` in two ways, and an export that opens with other experts or
rotary angles shows in the log-probabilities alone. The run goes on under another layout than it was saved in.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from kimi_policy import make_kimi
from programs import printed
from safetensors.torch import load_file
from tiny_logprobs import of_model
from whole_runs import ROOT, overrides, product

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.checkpoints.verify import verify
from megatron_scalerl.engine.options import engine_arguments
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.rollouts.group_files import listed_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.model_executor.models.deepseek_v2 import _get_moe_router_dtype
job = json.loads(sys.argv[2])
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20,
          attention_backend="CPU_MLA", enable_prefix_caching=False, enable_chunked_prefill=False,
          hf_overrides=job["overrides"])
sampling = SamplingParams(max_tokens=24, seed=1, logprobs=0, ignore_eos=True)
made = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
read = llm.generate([{"prompt_token_ids": ids} for ids in job["texts"]], scoring, use_tqdm=False)
of = lambda ids, rows: [row[token].logprob for token, row in zip(ids, rows)]
answer = dict(
    router=str(_get_moe_router_dtype(llm.llm_engine.model_config.hf_config)),
    sampled=[[*m.prompt_token_ids, *m.outputs[0].token_ids] for m in made],
    of_sampled=[of(m.outputs[0].token_ids, m.outputs[0].logprobs) for m in made],
    of_texts=[of(r.prompt_token_ids[1:], r.prompt_logprobs[1:]) for r in read],
)
print("answer", json.dumps(answer))
"""
MOONLIGHT = ROOT / "recipes/moonlight_16b_a3b_8gpus.yaml"
EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS = {
    "PP 2, layers 1 + 2": {
        "parallel": {"pipeline_model_parallel_size": 2},
        "model": {"num_layers_in_first_pipeline_stage": 1, **EXPERTS},
    },
    "TP 2": {"parallel": {"tensor_model_parallel_size": 2}, "model": {"sequence_parallel": True, **EXPERTS}},
}


def train(folder, steps, layout):
    more = f"""steps={steps} prompts.max_prompt_tokens=64 rewards.verifier=coin:toss rewards.truncated=wrong
        interruption.thinking_tokens=[20,20] interruption.answer_tokens=20 rollouts.max_staleness_steps=0
        validation.every_steps=0 validation.prompts=8 checkpoint.every_steps=2 optimizer.lr=1e-2
        trainer.micro_batch_tokens=1024 trainer.world_size=2 engine.vllm.attention_backend=CPU_MLA"""
    settings = overrides(
        folder,
        folder,
        "run",
        *more.split(),
        f"engine.vllm.hf_overrides={json.dumps(load_recipe(MOONLIGHT).engine.vllm['hf_overrides'])}",
        f"megatron={json.dumps(layout)}",
    )
    product("train", "recipes/tiny_cpu.yaml", *settings)


def of_transformers(folder, texts):
    """[texts][tokens - 1] log-probabilities, by the class whose name transformers has."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config.from_pretrained(folder)
    config.model_type = "deepseek_v3"  # under the folder's name it would leave out the experts
    model, said = DeepseekV3ForCausalLM.from_pretrained(folder, config=config, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    return of_model(model, texts)


def of_vllm(folder, **job):
    argv = [sys.executable, "-c", PROGRAM, folder, json.dumps(job)]
    output = printed(*argv, timeout=500, OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR")
    [said] = [line for line in output.splitlines() if line.startswith("answer ")]
    return json.loads(said.removeprefix("answer "))


def apart(first, second):
    return max(
        float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in zip(first, second, strict=True)
    )


def biases(folder):
    """The routers' biases in a folder."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}


def test_trainer_engine_and_export_agree_after_live_updates_and_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    make_kimi(tmp_path)
    before, after = LAYOUTS.values()
    train(tmp_path, 2, before)
    product("export", tmp_path / "run", "--out", tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "kimi_k2"
    with pytest.raises(ValueError, match="differ"):
        verify(tmp_path / "policy", tmp_path / "hf")
    initial, exported = biases(tmp_path / "policy"), biases(tmp_path / "hf")
    assert initial and exported.keys() == initial.keys()
    assert all(torch.equal(exported[name], bias) for name, bias in initial.items())
    train(tmp_path, 4, after)
    records = [record for record in read_jsonl(tmp_path / "run/metrics.jsonl") if "skipped" not in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["grad_norm"] > 0 for record in records)
    live = max(max(record["mismatch_max"], record["probe_mismatch_max"]) for record in records)
    # what the restarted run's engine sampled with the weights of the export
    groups = [group.read() for group in listed_groups(tmp_path / "run")]
    drawn = [(group["prompt"]["token_ids"], r) for group in groups for r in group["rollouts"]]
    drawn = [(list(prompt), r) for prompt, r in drawn if set(r["policy_versions"]) == {2}]
    assert len(drawn) >= 32  # and what the first run's engine began with these weights while its end was saved
    texts = [[*prompt, *r["token_ids"]] for prompt, r in drawn]
    theirs = of_transformers(tmp_path / "hf", texts)
    sampled = [torch.tensor(r["loss_mask"]) for _, r in drawn]
    of_engine = [torch.tensor(r["rollout_logprobs"])[mask] for (_, r), mask in zip(drawn, sampled)]
    engine = apart(of_engine, [row[-len(mask) :][mask] for row, mask in zip(theirs, sampled)])
    arguments = engine_arguments(load_recipe(MOONLIGHT), host="127.0.0.1", port=1)
    overrides = json.loads(arguments[arguments.index("--hf-overrides") + 1])
    prompts = [prompt for prompt, _ in drawn[:4]]
    answer = of_vllm(tmp_path / "hf", overrides=overrides, prompts=prompts, texts=texts[:4])
    assert answer["router"] == "torch.float32"
    read = apart(answer["of_texts"], theirs[:4])
    decoded = apart(answer["of_sampled"], [row[-24:] for row in of_transformers(tmp_path / "hf", answer["sampled"])])
    print(f"trainer, engine {live:.1e}; transformers: engine {engine:.1e}, vLLM {read:.1e}, decoding {decoded:.1e}")
    assert max(live, engine, read, decoded) <= 1e-4

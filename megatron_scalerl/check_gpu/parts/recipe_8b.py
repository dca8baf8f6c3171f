"""The 8B recipe as it stands, its trainer on eight GPUs (TP 2, sequence parallel, DP 4), with fewer layers.

Weights are random: only a config.json is written. A rehearsal takes two CPU ranks and tiny widths.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import megatron_scalerl
from megatron_scalerl.check_gpu import recipe_run
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.memory_report import report_memory
from megatron_scalerl.check_gpu.ranks import run_ranks
from megatron_scalerl.check_gpu.setting import Setting
from megatron_scalerl.check_gpu.synthetic import TOY
from megatron_scalerl.distributed import device
from megatron_scalerl.plan.predict import predict_trainer

LAYERS = 8
"""Of the recipe's 32: enough to be a quarter of its work, and built in seconds."""


def run(setting: Setting, record: Recorder) -> None:
    """Report the part's checks."""
    root = Path(megatron_scalerl.__file__).parent.parent / "recipes"
    folder = setting.scratch / "recipe-8b"
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((root / "configs" / "Llama-3.1-8B" / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS} | (TOY | {"num_hidden_layers": 2} if setting.toy else {})
    (folder / "config.json").write_text(json.dumps(config))
    world = 2 if setting.toy else 8
    overrides = [f"trainer.world_size={world}", "optimizer.warmup_steps=0"]
    overrides += ["trainer.micro_batch_tokens=256", "policy.dtype=float32"] if setting.toy else []
    job = {
        "recipe": str(root / "scalerl_llama3_8b.yaml"),
        "overrides": overrides,
        "policy": str(folder),
        "micro_batches": 2,
    }
    with record.guarded("steps"):
        found = run_ranks(
            world,
            "megatron_scalerl.check_gpu.recipe_run:measure",
            job,
            folder=folder / "ranks",
            timeout_s=0.9 * setting.limit_s,
            env={},
        )
        _report(setting, record, job, found)
        return
    record.not_run("memory", "its steps failed")


def _report(setting: Setting, record: Recorder, job: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Both checks: the ranks agree on the loss, and the fullest rank takes the memory that the planner says."""
    recipe = recipe_run.load(job)
    predicted = predict_trainer(
        recipe,
        job["policy"],
        layers="te" if device.HAVE_TE else "plain",
        device="gpu" if setting.on_gpu else "cpu",
        sequence_tokens=recipe.micro_batch_tokens,
    )
    losses = [answer["losses"] for answer in found]
    seconds = max(answer["seconds"][-1] for answer in found)
    rate = found[0]["tokens"] / seconds
    flops = predicted.model_flops_per_token * rate / len(found)
    text = f"{seconds:.3f} s a step of {found[0]['tokens']:,} tokens, {flops / 1e12:.4g} model TFLOP/s a rank"
    finite = all(math.isfinite(value) for loss in losses for value in loss)
    same = all(loss == losses[0] for loss in losses)
    wrong = f"expected one finite loss a step on all ranks, found {losses}"
    record.holds("steps", finite and same, text if finite and same else wrong, {"ranks": found})
    fullest = max((answer["peak"] for answer in found), key=lambda peak: peak["total"])
    said = {"total_bytes": predicted.total_bytes, "terms": {term.name: term.bytes for term in predicted.terms}}
    report_memory(record, "memory", said, fullest, judged=setting.on_gpu, data={"parameters": predicted.parameters})

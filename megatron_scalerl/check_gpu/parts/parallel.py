"""Two devices against one: the same step under every kind of parallelism, over NCCL on GPUs and gloo on CPUs."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_scalerl.check_gpu.deadline import prepare_environment
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.loop_run import command, faults, read_run
from megatron_scalerl.check_gpu.loop_settings import Run, check_overrides, overrides
from megatron_scalerl.check_gpu.ranks import run_ranks
from megatron_scalerl.check_gpu.setting import Setting
from megatron_scalerl.check_gpu.table import PARALLEL, Layers
from megatron_scalerl.check_gpu.tiny_task import recipe_path, tiny_folder
from megatron_scalerl.tiny.families import make

_WIDE = dict(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64,
)  # fmt: skip
"""Of both policies on GPUs; a rehearsal takes the families' own tiny widths."""
_BOUNDS = {"float32": (1e-4, 1e-4, 1e-3), "bfloat16": (3e-2, 3e-2, 5e-2)}
"""Nats of a log-probability (fp32: the largest, bf16: the mean), relative loss, relative gradient norm. fp32: sums
over ranks in another order. bf16: partial sums are rounded to 8 bits before ranks add them."""
_OVER_NCCL = Run(
    check="broadcast",
    overrides=("engine.vllm.enforce_eager=true",),
    steps=3,
    limit_s=90,
    on_cpu=False,
)
_LAUNCHES = 2 * (1 + len(PARALLEL))
"""Groups of processes on GPUs, with both kinds of layers."""


def run(setting: Setting, record: Recorder) -> None:
    """Report the part's checks."""
    prepare_environment(setting)
    _steps(setting, record, "plain", "float32", "")
    if setting.on_gpu and importlib.util.find_spec("transformer_engine"):
        _steps(setting, record, "te", "bfloat16", " te")
    else:
        why = "Transformer Engine is not installed" if setting.on_gpu else "Transformer Engine has no CPU kernels"
        for name in PARALLEL:
            record.not_run(f"{name} te", why)
    with record.guarded("broadcast"):
        _broadcast(setting, record)


def _steps(setting: Setting, record: Recorder, layers: Layers, dtype: str, suffix: str) -> None:
    """One rank alone, then two under each layout; on GPUs each layout in processes of its own, lest one hang all."""
    folder = setting.scratch / f"parallel-{layers}"
    policies = _write_policies(folder, _WIDE if setting.on_gpu else {}, dtype)

    def ranks(count: int, runs: list[tuple[str, str]], name: str) -> dict[str, Any]:
        return run_ranks(
            count,
            "megatron_scalerl.check_gpu.layouts:measure",
            {"dtype": dtype, "runs": runs},
            folder=folder / name,
            timeout_s=0.6 * setting.limit_s / (_LAUNCHES if setting.on_gpu else 2),
            env={"MSRL_LAYERS": layers},
        )[0]

    runs = [(name, policies["moe" if name == "EP2" else "dense"]) for name in PARALLEL]
    try:
        alone = ranks(1, list(policies.items()), "alone")
    except RuntimeError as error:
        for name in PARALLEL:
            record.holds(name + suffix, False, f"one rank alone: {error}")
        return
    for group in [[run] for run in runs] if setting.on_gpu else [runs]:
        found: dict[str, Any] = {}
        why = ""
        try:
            found = ranks(2, group, group[0][0] if len(group) == 1 else "all")
        except RuntimeError as error:
            why = str(error)
        for name, _ in group:
            if why:
                record.holds(name + suffix, False, why)
            else:
                report_distance(record, name + suffix, found[name], alone["moe" if name == "EP2" else "dense"], dtype)


def report_distance(
    record: Recorder, check: str, found: Mapping[str, Any], expected: Mapping[str, Any], dtype: str
) -> None:
    """The largest of the distances of two ranks' step from one rank's, each over its bound."""
    nats, loss, norm = _BOUNDS[dtype]
    apart = [abs(a - b) for key in ("before", "after") for a, b in zip(found[key], expected[key], strict=True)]
    distance = max(apart) if dtype == "float32" else sum(apart) / len(apart)
    shares = {
        "log-probabilities": distance / nats,
        "loss": abs(found["loss"] - expected["loss"]) / max(abs(expected["loss"]), 1e-6) / loss,
        "gradient norm": abs(found["grad_norm"] - expected["grad_norm"]) / expected["grad_norm"] / norm,
    }
    worst = max(shares, key=lambda name: shares[name])
    text = f"worst: {worst}; loss {found['loss']:.6g}, alone {expected['loss']:.6g}; {distance:.2g} nats apart"
    record.measured(check, shares[worst], "of tolerance", at_most=1.0, detail=text, data=shares)


def _write_policies(folder: Path, settings: dict[str, Any], dtype: str) -> dict[str, str]:
    """Random Hugging Face policies: name -> folder."""
    made = {}
    experts: dict[str, Any] = {"moe_intermediate_size": 384}
    for name, kind, more in (("dense", "llama", {}), ("moe", "qwen3_moe", experts)):
        make(kind, folder / name, dtype=getattr(torch, dtype), **settings, **(more if settings else {}))
        made[name] = str(folder / name)
    return made


def _broadcast(setting: Setting, record: Recorder) -> None:
    """A short run with the trainer on one GPU and the engine on another: every update goes over NCCL."""
    recipe, tiny = recipe_path(), tiny_folder(setting)
    settings = overrides(setting, tiny, _OVER_NCCL, policy=tiny / "base_policy", warm=False, transport="nccl")
    check_overrides(recipe, settings)
    if not setting.on_gpu:
        record.not_run("broadcast", "NCCL needs two GPUs; the part loop runs the same command over gloo")
        return
    log = setting.scratch / "loop" / "train-broadcast.log"
    log.parent.mkdir(exist_ok=True)
    done = asyncio.run(command(["train", str(recipe), *settings], log, limit_s=_OVER_NCCL.limit_s))
    found = read_run(log.parent / _OVER_NCCL.check, done)
    wrong = faults(found, steps=_OVER_NCCL.steps, warm=False)
    said = f"{found.steps} updates in {found.seconds:.0f} s with start, mismatch {found.mismatch:.2g} nats"
    text = "; ".join(wrong) or said
    record.holds("broadcast", not wrong, text, found.data())

"""Speed of full-width shapes on one device, and their peak memory compared with the planner's prediction.

    python tools/bench_shapes.py [--shapes 8b,1b] [--layers te|plain] [--toy] [--assumptions FILE]

Each shape trains a few steps in a process of its own, so that peaks are not affected by earlier work. Weights are
random and every micro-batch is full. With less memory than a shape needs, by the prediction, it has fewer layers.
Prints one JSON line per shape. --toy: tiny widths, for a CPU. --assumptions: writes the constants for `plan`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkout import explained

with explained():
    from measured_constants import Measurement, write_constants

    from megatron_scalerl.cluster.probe import nvidia_smi
    from megatron_scalerl.plan.hardware import GIB, GPUS, gpu_of_device
    from megatron_scalerl.processes.child_process import end_with
    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.types import Rollout, Sample

TOY: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
TOY |= dict(head_dim=16, vocab_size=512)
_1B: dict[str, Any] = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8)
_1B |= dict(head_dim=64, vocab_size=128256)
_8B = _1B | dict(hidden_size=4096, intermediate_size=14336, head_dim=128)
_SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
_FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WARM_UP, MEASURED = 2, 5
"""Steps; the first ones allocate and compile."""
SPARE = 1.1
"""A shape is built if its predicted memory times this is free."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A policy and its batch."""

    name: str
    config: Mapping[str, Any]
    """Of transformers' LlamaConfig, without the number of layers."""
    layers: int
    sequence: int
    """Tokens per sequence; an eighth is the prompt."""
    tokens: int = 16384
    """Per micro-batch."""
    micro_batches: int = 4
    recompute: Mapping[str, Any]
    """Recompute options in megatron.model."""
    dtype: str = "bfloat16"


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        # widths of Llama-3.1-8B and Llama-3.2-1B (with an untied head), as many layers as fit on one GPU
        Shape(name="8b", config=_8B, layers=4, sequence=4096, recompute={}),
        Shape(name="1b", config=_1B, layers=16, sequence=4096, recompute=_SELECTIVE),
        Shape(name="8b_recompute", config=_8B, layers=8, sequence=4096, recompute=_FULL),
        Shape(name="8b_long", config=_8B, layers=4, sequence=16384, recompute={}),
    )
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    p.add_argument("--layers", choices=("te", "plain"), default="plain")
    p.add_argument("--toy", action="store_true", help="tiny widths in fp32 on the CPU")
    p.add_argument("--assumptions", metavar="FILE", type=Path, help="write the constants for plan --assumptions FILE")
    p.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the process of one shape
    return p


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on the device; without a GPU those of the resident set. Produced by `memory`."""

    allocated: int
    """By tensors."""
    reserved: int
    """By PyTorch's caching allocator, free blocks included."""
    peak_allocated: int
    peak_reserved: int
    """Since `reset_peaks`."""
    used: int
    """On the whole device by all processes."""
    total: int


def memory() -> DeviceMemory:
    """Current memory, after all work queued on the device has finished."""
    import torch

    from megatron_scalerl.distributed import device

    if not device.HAVE_GPU:
        now, peak = _kib("/proc/self/status", "VmRSS"), _kib("/proc/self/status", "VmHWM")
        total = _kib("/proc/meminfo", "MemTotal")
        peaks = dict(peak_allocated=peak, peak_reserved=peak)
        return DeviceMemory(allocated=now, reserved=now, used=now, total=total, **peaks)
    device.synchronize()
    gpu = torch.get_device_module(device.device())
    free, total = gpu.mem_get_info()
    return DeviceMemory(
        allocated=gpu.memory_allocated(),
        reserved=gpu.memory_reserved(),
        peak_allocated=gpu.max_memory_allocated(),
        peak_reserved=gpu.max_memory_reserved(),
        used=total - free,
        total=total,
    )


def _kib(path: str, field: str) -> int:
    lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def reset_peaks() -> None:
    """Release cached blocks and reset the peaks."""
    import torch

    from megatron_scalerl.distributed import device

    gc.collect()
    if not device.HAVE_GPU:
        Path("/proc/self/clear_refs").write_text("5")
        return
    device.synchronize()
    gpu = torch.get_device_module(device.device())
    gpu.empty_cache()
    gpu.reset_peak_memory_stats()


def used_on_gpu() -> int | None:
    """Bytes in use on this process's GPU, before it has a context there those of others; None if unknown."""
    found = nvidia_smi("memory.used")
    return int(found) * 2**20 if found is not None and found.isdecimal() else None


def peak_since(before: int | None) -> dict[str, int | None]:
    """Peak of this process since `reset_peaks`, bytes. before: `used_on_gpu()`, without a GPU `memory().used` then.

    `runtime` is outside the allocator: CUDA context, kernels, NCCL buffers; None if `before` is, or without a GPU.
    """
    from megatron_scalerl.distributed import device

    end = memory()
    found: dict[str, int | None] = {"allocated": end.peak_allocated, "reserved": end.peak_reserved}
    if not device.HAVE_GPU:
        return found | {"runtime": None, "total": end.peak_reserved - (before or 0)}
    runtime = max(0, end.used - (before or 0) - end.reserved)
    return found | {"runtime": None if before is None else runtime, "total": end.peak_reserved + runtime}


def full_sequences(count: int, length: int, vocab: int, *, prompt: int | None = None) -> list[Sample]:
    """`count` sequences of `length` random tokens below `vocab`, an eighth of each its prompt; weights add up to 1.

    The engine's log-probs are -11 nats, about those of random weights with a vocabulary of 100,000.
    """
    rng = random.Random(0)
    prompt = length // 8 if prompt is None else prompt
    size = length - prompt
    rollout = dict(rollout_logprobs=(-11.0,) * size, policy_versions=(0,) * size, loss_mask=(True,) * size, seed=0)
    rollout |= dict(interrupted=False, truncated=False, thinking_cut=0)
    return [
        Sample(
            prompt_token_ids=tuple(rng.choices(range(vocab), k=prompt)),
            rollout=Rollout(token_ids=tuple(rng.choices(range(vocab), k=size)), **rollout),
            advantage=rng.choice((-1.0, 1.0)),
            token_weight=1.0 / (count * size),
        )
        for _ in range(count)
    ]


def recipe_of(shape: Shape, folder: Path) -> Recipe:
    """The recipe that trains the policy in `folder`/config.json."""
    return Recipe.model_validate(
        {
            "name": "bench_shapes",
            "steps": 1,
            "policy": {"path": str(folder), "dtype": shape.dtype},
            "prompts": {"path": "none.jsonl"},
            "trainer": {"micro_batch_tokens": shape.tokens},
            "megatron": {"model": dict(shape.recompute)},
        }
    )


def fitting(shape: Shape, folder: Path, free: int) -> tuple[Shape, Any]:
    """(the shape with as many of its layers as fit, its prediction); writes its config.json.

    Raises ValueError if one layer does not fit.
    """
    from transformers import LlamaConfig

    from megatron_scalerl.distributed import device
    from megatron_scalerl.plan.work import predict_trainer

    while True:
        settings: dict[str, Any] = dict(num_hidden_layers=shape.layers, tie_word_embeddings=False)
        settings |= dict(max_position_embeddings=131072, architectures=["LlamaForCausalLM"])
        LlamaConfig(**shape.config, **settings).save_pretrained(folder)
        predicted = predict_trainer(
            recipe_of(shape, folder),
            folder,
            layers="te" if device.HAVE_TE else "plain",
            device="gpu" if device.HAVE_GPU else "cpu",
            sequence_tokens=shape.sequence,
        )
        need = predicted.total_bytes * SPARE
        if need <= free:
            return shape, predicted
        if shape.layers == 1:
            raise ValueError(f"{shape.name}: one layer needs {need / GIB:.1f} GiB, {free / GIB:.1f} are free")
        shape = replace(shape, layers=shape.layers // 2)


def train(
    recipe: Recipe, parallel: Any, before: int | None, *, count: int, length: int, steps: int
) -> dict[str, Any]:
    """Losses, seconds and tokens of `steps` steps on random weights and full micro-batches, and the `peak_since`.

    count: sequences of `length` tokens for each data-parallel rank.
    """
    from megatron_scalerl.batching.packing import pack
    from megatron_scalerl.trainer.step import make_trainer, pad_multiple

    trainer = make_trainer(recipe, parallel, load_weights=False)
    vocab = json.loads(Path(recipe.policy.path, "config.json").read_text())["vocab_size"]
    samples = full_sequences(parallel.dp_size * count, length, vocab)
    packing: dict[str, Any] = dict(micro_batch_tokens=recipe.micro_batch_tokens, policy_version=0)
    batches = pack(samples, step=1, dp_size=parallel.dp_size, pad_multiple=pad_multiple(parallel), **packing)
    batch = batches[parallel.dp_rank]
    reports = [trainer.step(replace(batch, step=step)) for step in range(1, steps + 1)]
    return {
        "losses": [report.loss for report in reports],
        "seconds": [report.seconds for report in reports],
        "tokens": reports[-1].tokens,
        "peak": peak_since(before),
    }


def measure(shape: Shape, folder: Path) -> dict[str, Any]:
    """Build, train and measure in this process, which has done nothing on the device."""
    before = used_on_gpu()
    import torch

    from megatron_scalerl.distributed import device
    from megatron_scalerl.trainer.ranks import init_parallel

    parallel = init_parallel(recipe_of(shape, folder))
    reset_peaks()
    start = memory()
    before = before if device.HAVE_GPU else start.used
    shape, predicted = fitting(shape, folder, start.total - start.used)
    sizes = dict(count=shape.micro_batches * (shape.tokens // shape.sequence), length=shape.sequence)
    found = train(recipe_of(shape, folder), parallel, before, **sizes, steps=WARM_UP + MEASURED)
    name = torch.get_device_module(parallel.device).get_device_name(parallel.device) if device.HAVE_GPU else ""
    rate = found["tokens"] / statistics.median(found["seconds"][WARM_UP:])
    return {
        "shape": shape.name,
        "gpu": name,
        "layers": "te" if device.HAVE_TE else "plain",
        "depth": shape.layers,
        "tokens_per_second": rate,
        "model_flops_per_second": predicted.model_flops_per_token * rate,
        **found,
        **memory_figures(predicted, found["peak"]),
        **constants(shape, predicted, found["peak"], gpu=name, rate=rate),
    }


def memory_figures(predicted: Any, peak: Mapping[str, int | None]) -> dict[str, Any]:
    """Peak memory (bytes) and the planner's prediction over it."""
    ratio = predicted.total_bytes / max(1, peak["total"] or 0)
    terms = {term.name: term.bytes for term in predicted.terms}
    return {"predicted_over_measured": ratio, "predicted": predicted.total_bytes, "terms": terms}


def constants(
    shape: Shape, predicted: Any, peak: Mapping[str, int | None], *, gpu: str, rate: float
) -> dict[str, Any]:
    """MFU, and fields of the planner's `Assumptions`; empty unless on a GPU in bf16. rate: tokens per second."""
    key = gpu_of_device(gpu)
    if not gpu or shape.dtype != "bfloat16":
        return {}
    assert peak["reserved"] is not None and peak["allocated"] is not None
    found = {"fragmentation": max(0, peak["reserved"] - peak["allocated"]) / predicted.moving_bytes}
    if peak["runtime"] is not None:
        found["runtime_gib"] = peak["runtime"] / GIB
    if key is not None:
        found["mfu"] = predicted.model_flops_per_token * rate / GPUS[key].bf16_flops
        found["dense_utilization"] = predicted.hardware_flops_per_token * rate / GPUS[key].bf16_flops
    return found


def toy(shape: Shape) -> Shape:
    """The shape at toy size for a CPU, in fp32."""
    small: dict[str, Any] = dict(config=TOY, layers=2, tokens=256, micro_batches=2, dtype="float32")
    return replace(shape, sequence=shape.sequence // 64, **small)


def in_process(name: str, *, layers: str, toy: bool, timeout_s: float = 300.0) -> dict[str, Any]:
    """The figures of one shape, measured in a process of its own. Raises RuntimeError with its last error."""
    argv = [sys.executable, __file__, "--here", "--shapes", name, *(["--toy"] if toy else [])]
    env = os.environ | {"MSRL_LAYERS": layers} | ({"CUDA_VISIBLE_DEVICES": ""} if toy else {})
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    options = parser().parse_args()
    chosen = options.shapes.split(",")
    if options.here:
        shape = SHAPES[chosen[0]]
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(toy(shape) if options.toy else shape, Path(folder))))
        return
    lines = []
    for name in chosen:
        lines.append(in_process(name, layers=options.layers, toy=options.toy))
        print(json.dumps(lines[-1]), flush=True)
    if options.assumptions:
        measured = [Measurement(layers=line["layers"], figures=line) for line in lines]
        if not write_constants(options.assumptions, measured, gpu=lines[0]["gpu"], source="tools/bench_shapes.py"):
            raise RuntimeError(f"{options.assumptions}: expected constants of a GPU in bf16, found none to write")


if __name__ == "__main__":
    end_with(main)

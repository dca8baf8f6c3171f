"""Speed of full-width shapes on one device, and their peak memory compared with the planner's prediction.

    python tools/bench_shapes.py [--shapes 8b,1b] [--layers te|plain] [--toy] [--assumptions FILE]

Each shape trains a few steps in a separate process, so that peaks are not affected by earlier work. Weights are
random and every micro-batch is full. With less memory than a shape needs, by the prediction, it has fewer layers.
Prints one JSON line per shape. --toy: tiny widths, for a CPU. --assumptions: writes the constants for `plan`.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
from checkout import explained

with explained():
    from megatron_scalerl.plan.hardware import GIB, GPUS, gpu_of_device
    from megatron_scalerl.processes.child_process import end_with

TOY = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
TOY |= dict(head_dim=16, vocab_size=512)
_1B = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8)
_1B |= dict(head_dim=64, vocab_size=128256)
_8B = _1B | dict(hidden_size=4096, intermediate_size=14336, head_dim=128)
_SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WARM_UP = 2
"""Steps that are not measured: they allocate and compile."""
MEASURED = 5
"""Steps that are measured."""
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


SHAPES = {
    shape.name: shape
    for shape in (
        # widths of Llama-3.1-8B and Llama-3.2-1B (with an untied head), as many layers as fit on one GPU
        Shape(name="8b", config=_8B, layers=4, sequence=4096, recompute={}),
        Shape(name="1b", config=_1B, layers=16, sequence=4096, recompute=_SELECTIVE),
        Shape(name="8b_recompute", config=_8B, layers=8, sequence=4096, recompute=_FULL),
        Shape(name="8b_long", config=_8B, layers=4, sequence=16384, recompute={}),
    )
}


parser = harness.benchmark(
    __doc__,
    shapes=(",".join(SHAPES), "default: %(default)s"),
    layers=["plain", "te"],
    toy=(False, "tiny widths in fp32 on the CPU"),
    assumptions=(Path, "write the constants for plan --assumptions FILE"),
    here=(False, argparse.SUPPRESS),
)


def memory():
    """Current memory in bytes, after all work queued on the device has finished.

    allocated: by tensors. reserved: by PyTorch's caching allocator, free blocks included. peak_allocated and
    peak_reserved: since `reset_peaks`. used: on the whole device by all processes. Without a GPU those of the
    resident set.
    """
    import torch

    from megatron_scalerl.distributed import device

    if not device.HAVE_GPU:
        now = harness.memory_of("VmRSS")
        peak = harness.memory_of("VmHWM")
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found = dict(allocated=now, reserved=now, used=now, total=total)
        return SimpleNamespace(**found, peak_allocated=peak, peak_reserved=peak)
    device.synchronize()
    gpu = torch.get_device_module(device.device())
    free, total = gpu.mem_get_info()
    return SimpleNamespace(
        allocated=gpu.memory_allocated(),
        reserved=gpu.memory_reserved(),
        peak_allocated=gpu.max_memory_allocated(),
        peak_reserved=gpu.max_memory_reserved(),
        used=total - free,
        total=total,
    )


def reset_peaks():
    """Release cached blocks and reset the peaks."""
    import torch

    from megatron_scalerl.distributed import device

    gc.collect()
    if not device.HAVE_GPU:
        harness.reset_peak()
        return
    device.synchronize()
    gpu = torch.get_device_module(device.device())
    gpu.empty_cache()
    gpu.reset_peak_memory_stats()


def used_on_gpu():
    """Bytes in use on this process's GPU, before it has a context there those of others; None if unknown."""
    mib = harness.nvidia_smi("memory.used") or ""
    if not mib.isdecimal():
        return None
    return int(mib) * 2**20


def peak_since(before):
    """Peak of this process since `reset_peaks`, bytes. before: `used_on_gpu()`, without a GPU `memory().used` then.

    `runtime` is outside the allocator: CUDA context, kernels, NCCL buffers; None if `before` is, or without a GPU.
    """
    from megatron_scalerl.distributed import device

    end = memory()
    found = {"allocated": end.peak_allocated, "reserved": end.peak_reserved}
    if not device.HAVE_GPU:
        return found | {"runtime": None, "total": end.peak_reserved - (before or 0)}
    runtime = max(0, end.used - (before or 0) - end.reserved)
    return found | {"runtime": None if before is None else runtime, "total": end.peak_reserved + runtime}


def recipe_for(shape, folder):
    """The recipe that trains the policy in `folder`/config.json."""
    from random_inputs import recipe_of

    trainer = {"micro_batch_tokens": shape.tokens}
    model = {"model": dict(shape.recompute)}
    return recipe_of(folder, dtype=shape.dtype, trainer=trainer, megatron=model)


def fitting(shape, folder, free):
    """(the shape with as many of its layers as fit, its prediction); writes its config.json.

    Raises ValueError if one layer does not fit.
    """
    from predicted_trainer import predict_trainer
    from transformers import LlamaConfig

    from megatron_scalerl.distributed import device

    while True:
        settings = dict(num_hidden_layers=shape.layers, tie_word_embeddings=False)
        settings |= dict(max_position_embeddings=131072, architectures=["LlamaForCausalLM"])
        LlamaConfig(**shape.config, **settings).save_pretrained(folder)
        predicted = predict_trainer(
            recipe_for(shape, folder),
            folder,
            layers="te" if device.HAVE_TE else "plain",
            device="gpu" if device.HAVE_GPU else "cpu",
            sequence_tokens=shape.sequence,
        )
        need = predicted.total_bytes * SPARE
        if need <= free:
            return shape, predicted
        if shape.layers == 1:
            raise ValueError(f"{shape.name}: one layer needs {need / GIB:.1f} GiB, and {free / GIB:.1f} are free")
        shape = replace(shape, layers=shape.layers // 2)


def train(recipe, parallel, before, *, count, length, steps):
    """Losses, seconds and tokens of `steps` steps on random weights and full micro-batches, and the `peak_since`.

    count: sequences of `length` tokens for each data-parallel rank.
    """
    from random_inputs import random_samples

    from megatron_scalerl.batching.packing import pack
    from megatron_scalerl.trainer.step import make_trainer, pad_multiple

    trainer = make_trainer(recipe, parallel, load_weights=False)
    vocab = json.loads(Path(recipe.policy.path, "config.json").read_text())["vocab_size"]
    samples = random_samples(parallel.dp_size * count, (length, length), vocab, share=8, logprob=-11)
    packing = dict(micro_batch_tokens=recipe.micro_batch_tokens, policy_version=0)
    batches = pack(samples, step=1, dp_size=parallel.dp_size, pad_multiple=pad_multiple(parallel), **packing)
    batch = batches[parallel.dp_rank]
    reports = [trainer.step(replace(batch, step=step)) for step in range(1, steps + 1)]
    return {
        "losses": [report.loss for report in reports],
        "seconds": [report.seconds for report in reports],
        "tokens": reports[-1].tokens,
        "peak": peak_since(before),
    }


def measure(shape, folder):
    """Build, train and measure in this process, which has done nothing on the device."""
    before = used_on_gpu()
    import torch

    from megatron_scalerl.distributed import device
    from megatron_scalerl.trainer.ranks import init_parallel

    parallel = init_parallel(recipe_for(shape, folder))
    reset_peaks()
    start = memory()
    name = ""
    if device.HAVE_GPU:
        name = torch.get_device_module(parallel.device).get_device_name(parallel.device)
    else:
        before = start.used
    shape, predicted = fitting(shape, folder, start.total - start.used)
    sizes = dict(count=shape.micro_batches * (shape.tokens // shape.sequence), length=shape.sequence)
    found = train(recipe_for(shape, folder), parallel, before, **sizes, steps=WARM_UP + MEASURED)
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


def memory_figures(predicted, peak):
    """Peak memory (bytes) and the planner's prediction over it."""
    ratio = predicted.total_bytes / max(1, peak["total"] or 0)
    terms = {term.name: term.bytes for term in predicted.terms}
    return {"predicted_over_measured": ratio, "predicted": predicted.total_bytes, "terms": terms}


def constants(shape, predicted, peak, *, gpu, rate):
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


def toy(shape):
    """The shape at toy size for a CPU, in fp32."""
    small = dict(config=TOY, layers=2, tokens=256, micro_batches=2, dtype="float32")
    return replace(shape, sequence=shape.sequence // 64, **small)


def main():
    """Measure and print."""
    options = parser().parse_args()
    chosen = options.shapes.split(",")
    if options.here:
        shape = SHAPES[chosen[0]]
        if options.toy:
            shape = toy(shape)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(shape, Path(folder))))
        return
    lines = []
    words = []
    variables = {"MSRL_LAYERS": options.layers}
    if options.toy:
        words.append("--toy")
        variables["CUDA_VISIBLE_DEVICES"] = ""
    for name in chosen:
        found = harness.child(__file__, "--here", "--shapes", name, *words, **variables)
        harness.report(options, found)
        lines.append(found)
    if options.assumptions:
        measured = [(line["layers"], line) for line in lines]
        if not harness.write_constants(
            options.assumptions, measured, gpu=lines[0]["gpu"], source="tools/bench_shapes.py"
        ):
            raise RuntimeError(
                f"{options.assumptions}: nothing is written, since no constant was measured on a GPU in bf16"
            )


if __name__ == "__main__":
    end_with(main)

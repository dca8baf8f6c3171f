"""Train a shape of full width for a few steps and measure their time and memory.

    python -m megatron_scalerl.check_gpu.shape_run JSON

is a separate process, so that peaks are not affected by earlier work; it writes NAME.json into a folder. Weights are
random, initialized by Megatron; only a config.json is written. Every micro-batch is full.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_scalerl.batching.packing import pack, real_tokens
from megatron_scalerl.check_gpu.cases import TOY, bare_recipe, full_micro_batches
from megatron_scalerl.processes.child_process import end_with
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import Batch

if TYPE_CHECKING:
    from megatron_scalerl.plan.work import TrainerPrediction

_LLAMA_1B: dict[str, Any] = dict(
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
)
_LLAMA_8B: dict[str, Any] = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
)
_SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
_FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WARM_UP = 2
"""Warm-up steps, which allocate and compile."""
MEASURED = (2, 5)
"""Minimum and, time permitting, maximum number of measured steps."""
_PRODUCTS = 30
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
        Shape(name="8b", config=_LLAMA_8B, layers=4, sequence=4096, recompute={}),
        Shape(name="1b", config=_LLAMA_1B, layers=16, sequence=4096, recompute=_SELECTIVE),
        Shape(name="8b_recompute", config=_LLAMA_8B, layers=8, sequence=4096, recompute=_FULL),
        Shape(name="8b_long", config=_LLAMA_8B, layers=4, sequence=16384, recompute={}),
    )
}
"""By name, most important first."""


def toy(shape: Shape) -> Shape:
    """The shape at toy size for a CPU, in fp32."""
    return replace(
        shape, config=TOY, layers=2, sequence=shape.sequence // 64, tokens=256, micro_batches=2, dtype="float32"
    )


def recipe_of(shape: Shape, folder: Path) -> Recipe:
    """The recipe that trains the policy in `folder`/config.json."""
    return bare_recipe(folder, shape.dtype, shape.tokens, megatron={"model": dict(shape.recompute)})


def write_config(shape: Shape, folder: Path) -> None:
    """Write `folder`/config.json."""
    from transformers import LlamaConfig

    LlamaConfig(
        **shape.config,
        num_hidden_layers=shape.layers,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def batch_of(shape: Shape) -> Batch:
    """Sequences of random tokens that fill every micro-batch."""
    found = full_micro_batches(
        shape.micro_batches * (shape.tokens // shape.sequence), shape.sequence, shape.config["vocab_size"]
    )
    [batch] = pack(found, step=1, dp_size=1, micro_batch_tokens=shape.tokens, pad_multiple=1, policy_version=0)
    assert len(batch.micro_batches) == shape.micro_batches
    return batch


def predict(shape: Shape, folder: Path, *, te: bool, gpu: bool) -> TrainerPrediction:
    """The planner's prediction, with its default assumptions."""
    from megatron_scalerl.plan.work import predict_trainer

    return predict_trainer(
        recipe_of(shape, folder),
        folder,
        layers="te" if te else "plain",
        device="gpu" if gpu else "cpu",
        sequence_tokens=shape.sequence,
    )


def as_json(predicted: TrainerPrediction) -> dict[str, Any]:
    """The fields of a prediction that `parts.shapes` reads."""
    names = ("total_bytes", "moving_bytes", "parameters", "model_flops_per_token", "hardware_flops_per_token")
    terms = {term.name: term.bytes for term in predicted.terms}
    return {"terms": terms} | {name: getattr(predicted, name) for name in names}


def fitting(shape: Shape, folder: Path, free: int, *, te: bool, gpu: bool) -> tuple[Shape, TrainerPrediction, bool]:
    """(the shape with as many of its layers as fit, its prediction, whether at least one layer fits).

    Writes its config.json.
    """
    while True:
        write_config(shape, folder)
        predicted = predict(shape, folder, te=te, gpu=gpu)
        fits = predicted.total_bytes * SPARE <= free
        if fits or shape.layers == 1:
            return shape, predicted, fits
        shape = replace(shape, layers=shape.layers // 2)


def gemm_rate(size: int, dtype: Any) -> float:
    """FLOP/s of multiplying two random matrices [size, size] (zeros would be faster)."""
    import torch

    from megatron_scalerl.distributed import device

    a, b = (torch.randn(size, size, device=device.device(), dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    device.synchronize()
    start = time.perf_counter()
    for _ in range(_PRODUCTS):
        a @ b
    device.synchronize()
    return _PRODUCTS * 2 * size**3 / (time.perf_counter() - start)


def measure(shape: Shape, folder: Path, parallel: Any, others: int | None, deadline: float) -> dict[str, Any]:
    """Build, train, and measure time and peak memory.

    others: bytes on the device that do not count, None if unknown; without a GPU those of this process before the
    build. No measured step starts after `deadline` on the monotonic clock.
    """
    import torch

    from megatron_scalerl.check_gpu.device_memory import memory, peak_since, reset_peaks
    from megatron_scalerl.distributed import device
    from megatron_scalerl.trainer.step import make_trainer

    gpu = device.HAVE_GPU
    reset_peaks()
    start = memory()
    asked = shape.layers
    shape, predicted, fits = fitting(shape, folder, start.free, te=device.HAVE_TE, gpu=gpu)
    result: dict[str, Any] = {
        "layers": shape.layers,
        "layers_asked": asked,
        "predicted": as_json(predicted),
        "free": start.free,
        "fits": fits,
        "te": device.HAVE_TE,
    }
    if not fits:
        return result
    trainer = make_trainer(recipe_of(shape, folder), parallel, load_weights=False)
    built = memory().allocated
    batch = batch_of(shape)
    seconds: list[float] = []
    while len(seconds) < WARM_UP + MEASURED[0] or (
        len(seconds) < WARM_UP + MEASURED[1] and time.monotonic() + seconds[-1] < deadline
    ):
        report = trainer.step(replace(batch, step=len(seconds) + 1))
        seconds.append(report.seconds)
        print(f"{shape.name} step {report.step}: {report.seconds:.3f} s, loss {report.loss:.5f}", flush=True)
    peak = peak_since(others)
    dtype = torch.float32 if shape.dtype == "float32" else torch.bfloat16
    del trainer
    reset_peaks()
    return result | {
        "seconds": seconds,
        "tokens": real_tokens(batch),
        "built": built,
        "peak": asdict(peak),
        "gpu": torch.get_device_module(parallel.device).get_device_name(parallel.device) if gpu else "",
        "gemm_flops": gemm_rate(8192 if gpu else 512, dtype),
    }


def main() -> None:
    """The process: trains its shapes one after another; measuring peaks requires a single shape."""
    asked = json.loads(sys.argv[1])
    deadline = time.monotonic() + asked["measure_s"]
    from megatron_scalerl.check_gpu.device_memory import memory, used_by_driver

    others = used_by_driver() if asked["on_gpu"] else None
    from megatron_scalerl.trainer.ranks import init_parallel

    folder = Path(asked["folder"])
    parallel = None
    for given in asked["shapes"]:
        shape, place = Shape(**given), folder / given["name"]
        if parallel is None:
            parallel = init_parallel(recipe_of(shape, place))
            others = others if asked["on_gpu"] else memory().used
        found = measure(shape, place, parallel, others, deadline)
        (folder / f"{shape.name}.json").write_text(json.dumps(found), encoding="utf8")


if __name__ == "__main__":
    end_with(main)

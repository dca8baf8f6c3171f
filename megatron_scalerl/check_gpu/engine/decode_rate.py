"""Check `decode rate`: seconds per decode step of a tiny and of a 1B policy, for the planner's assumptions.

Both engines use CUDA graphs but not torch.compile, for which this part has no time. In the planner's model
(`plan.engine`) a step is a fixed time plus reading the weights at a share of the memory bandwidth: the tiny policy
measures the former, the difference to the large policy the latter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.device_memory import used_by_driver
from megatron_scalerl.check_gpu.engine.reference import write_config_only
from megatron_scalerl.check_gpu.engine.scene import Scene, Serving, engine_options, recipe_of, serve
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import Deadline
from megatron_scalerl.check_gpu.probe import nvidia_smi
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.plan.assumptions import check_number, described
from megatron_scalerl.plan.counting import Parameters, count, load_family
from megatron_scalerl.plan.hardware import GIB, GPUS, gpu_of_device

CHECK = "decode rate"
BATCHES = (1, 64)
_RUN_S = 25.0
"""Assumed seconds of graph capture and measurements, in addition to the start of an eager engine."""
_KV_BYTES = 4 * GIB
_SHORT, _LONG = 16, 144
"""Tokens of the two measurements, whose difference counts."""
_RELEASE_S = 5.0
"""For the driver to release the memory of an engine that has exited."""


async def check_decode_rate(scene: Scene, record: Recorder, deadline: Deadline, *, start_s: float) -> None:
    """Record CHECK. Raises RuntimeError if an engine does not start.

    start_s: measured seconds of an eager engine's start.
    """
    no_cpu = "a CPU's decode rate is not used by the planner"
    obstacle = scene.obstacle(deadline, start_s + _RUN_S, start_s, on_cpu=no_cpu)
    if obstacle:
        record.not_run(CHECK, obstacle)
        return
    graphs: dict[str, Any] = {
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(BATCHES),
        },
    }
    large = write_config_only(scene.folder / "one_b")
    common, limit_s = engine_options(scene.setting) | graphs, deadline.left() - _RUN_S
    recipes = (
        recipe_of(scene.setting, Path(scene.recipe.policy.path), start_s=limit_s, vllm=common),
        recipe_of(
            scene.setting,
            large,
            start_s=limit_s,
            vllm=common | {"load_format": "dummy", "kv_cache_memory_bytes": _KV_BYTES},
        ),
    )
    started = await asyncio.gather(
        *(serve(r, scene.folder / f"engine-{n}.log") for r, n in zip(recipes, ("small", "large"))),
        return_exceptions=True,
    )
    engines = [engine for engine in started if isinstance(engine, Serving)]
    try:
        for problem in started:
            if isinstance(problem, BaseException):
                raise problem
        small_engine, large_engine = engines
        await _measure(record, small_engine, large_engine, count(load_family(large)[0]))
    finally:
        await asyncio.gather(*(engine.process.stop() for engine in engines))


async def _measure(record: Recorder, small: Serving, large: Serving, parameters: Parameters) -> None:
    seconds = {
        name: {batch: await step_seconds(engine.process.client, batch) for batch in BATCHES}
        for name, engine in (("tiny", small), ("1b", large))
    }
    held = used_by_driver()
    await large.process.stop()
    freed = None if held is None else await _freed(held, 2 * parameters.total + _KV_BYTES)
    gpu = gpu_of_device(nvidia_smi("name") or "")
    found = rates(seconds["tiny"], seconds["1b"], parameters, gpu=gpu, freed_bytes=freed)
    data, omitted = within_range(found)
    rate = BATCHES[-1] / seconds["1b"][BATCHES[-1]]
    detail = (
        f"1B shape, bf16, {BATCHES[-1]} completions, CUDA graphs ({large.facts['cuda_graphs']}), no torch.compile; "
        f"one step takes {seconds['1b'][1] * 1e3:.3g} ms with one completion, "
        f"{seconds['tiny'][1] * 1e3:.3g} ms with the tiny policy" + "".join(f"; omitted: {text}" for text in omitted)
    )
    record.measured(CHECK, rate, "tokens/s", detail=detail, data=data)


def rates(
    tiny: dict[int, float],
    large: dict[int, float],
    parameters: Parameters,
    *,
    gpu: str | None,
    freed_bytes: int | None,
) -> dict[str, Any]:
    """Measured assumptions of the planner, by name.

    tiny, large: seconds of a decode step by batch size. parameters: of the large policy. gpu: key of the planner's
    table. freed_bytes: device memory released when the large engine exited.
    """
    read = 2 * (parameters.total - parameters.embedding)
    data: dict[str, Any] = {
        "engine_step_ms": tiny[1] * 1e3,
        "step_ms": {
            "tiny": {str(n): s * 1e3 for n, s in tiny.items()},
            "1b": {str(n): s * 1e3 for n, s in large.items()},
        },
        "bytes_read": read,
        "gpu": gpu,
    }
    rest = large[1] - tiny[1]
    if gpu is not None and rest > 0:
        data["hbm_efficiency"] = read / rest / GPUS[gpu].memory_bytes_per_second
    if freed_bytes is not None:
        data["engine_overhead_gib"] = (freed_bytes - 2 * parameters.total - _KV_BYTES) / GIB
    return data


def within_range(found: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(`found` without assumptions that are out of range, what was omitted and why)."""
    known = {field.name for field in described()}
    data, omitted = dict(found), []
    for name in known & found.keys():
        try:
            check_number(name, found[name])
        except ValueError as error:
            omitted.append(f"{name}: {error}")
            del data[name]
    return data, sorted(omitted)


async def step_seconds(client: EngineClient, batch: int) -> float:
    """Seconds per decode step with `batch` completions, prefill excluded."""

    async def timed(tokens: int) -> float:
        begin = time.perf_counter()
        specs = [SamplingSpec(max_tokens=tokens, seed=i, ignore_eos=True) for i in range(batch)]
        await asyncio.gather(*(client.generate([1, 6, 7, 8], sampling=spec) for spec in specs))
        return time.perf_counter() - begin

    await timed(_SHORT)
    short = await timed(_SHORT)
    return (await timed(_LONG) - short) / (_LONG - _SHORT)


async def _freed(held: int, expected: int) -> int | None:
    """Bytes of `held` that the GPU has released: when `expected` is reached, otherwise after _RELEASE_S."""
    end = time.monotonic() + _RELEASE_S
    while True:
        used = used_by_driver()
        if used is None:
            return None
        if held - used >= expected or time.monotonic() > end:
            return held - used
        await asyncio.sleep(0.5)

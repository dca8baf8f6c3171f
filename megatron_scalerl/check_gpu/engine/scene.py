"""What the engine's checks use: policies, recipes and prompts, and the processes of an engine and a trainer."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.engine.reference import write_dense
from megatron_scalerl.check_gpu.part import Deadline, PartSetting
from megatron_scalerl.check_gpu.programs import cause, read_log, serving_facts, stop
from megatron_scalerl.check_gpu.tiny_task import fallback_backend, tiny_folder
from megatron_scalerl.controller.preflight import Inputs, check_inputs
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.engine.answers import EngineInfo
from megatron_scalerl.engine.options import check_options
from megatron_scalerl.launch.process import EngineProcess
from megatron_scalerl.launch.trainer import start_rank
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import dump_recipe
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.trainer.messages import TrainerInfo
from megatron_scalerl.types import Prompt

THINKING, ANSWER = 200, 8
"""Maximum interruption point and answer budget (tokens)."""
CONTEXT = 4096
SECRET = "check-gpu-" + uuid.uuid4().hex
TRANSPORT = "gloo"
"""Trainer and engine share a GPU, and NCCL does not support two ranks on one."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Inputs of the engine's checks. Produced by `make_scene`."""

    setting: PartSetting
    folder: Path
    """Logs, recipes and policies of this part."""
    recipe: Recipe
    """With the policy that the engine loads."""
    inputs: Inputs
    other: Path
    """A policy of the same shape with other weights, which the trainer loads."""

    @property
    def dtype(self) -> str:
        """Of the policies."""
        return self.recipe.policy.dtype

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """At least 8."""
        return self.inputs.prompts.held_out

    def obstacle(self, deadline: Deadline, seconds: float, start_s: float, *, on_cpu: str) -> str:
        """Why a check on GPUs that takes `seconds` cannot run; "" if it can. start_s: of an engine that started."""
        return deadline.too_short(seconds, f"an engine started in {start_s:.0f} s") if self.setting.on_gpu else on_cpu


def engine_options(setting: PartSetting) -> dict[str, Any]:
    """`engine.vllm` for a small policy on a device shared with a trainer: the KV cache has a size in bytes."""
    options: dict[str, Any] = {"max_model_len": CONTEXT, "max_num_seqs": 64, "kv_cache_memory_bytes": 128 << 20}
    if not setting.on_gpu:
        return options
    backend = fallback_backend(setting)
    if backend is not None:
        options["attention_backend"] = backend
    return options | {"gpu_memory_utilization": 0.3, "enforce_eager": True, "max_num_batched_tokens": 2048}


def recipe_of(setting: PartSetting, policy: Path, *, start_s: float, vllm: dict[str, Any], **sections: Any) -> Recipe:
    """A recipe on the tiny task's prompts with `policy`. Raises ValueError for rejected options."""
    tiny = tiny_folder(setting)
    data: dict[str, dict[str, Any]] = {
        "policy": {"path": str(policy), "dtype": "bfloat16" if setting.on_gpu else "float32"},
        "prompts": {
            "path": str(tiny / "prompts.jsonl"),
            "held_out_path": str(tiny / "held_out.jsonl"),
            "max_prompt_tokens": 32,
        },
        "interruption": {"thinking_tokens": [1, THINKING], "answer_tokens": ANSWER},
        "rollouts": {"kv_cache": "recompute"},
        "rewards": {"workers": 1},
        "trainer": {"micro_batch_tokens": 2048, "step_timeout_s": 60, "start_timeout_s": start_s},
        "engine": {"start_timeout_s": start_s, "stall_timeout_s": 30, "vllm": vllm},
        "weights": {"transport": TRANSPORT, "timeout_s": 40},
    }
    check_options(vllm)
    return Recipe.model_validate(
        {"name": "check", "steps": 1} | {k: data.get(k, {}) | sections.get(k, {}) for k in data | sections}
    )


def make_scene(setting: PartSetting, start_s: float) -> Scene:
    """Write the policies and check the inputs. start_s: time limit of a process's start."""
    folder = setting.scratch / "engine"
    folder.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):  # of an earlier call: processes append to their logs
        log.unlink()
    dtype = "bfloat16" if setting.on_gpu else "float32"
    first, other = (write_dense(folder / f"dense_{seed}", seed=seed, dtype=dtype, toy=setting.toy) for seed in (0, 1))
    recipe = recipe_of(setting, first, start_s=start_s, vllm=engine_options(setting))
    inputs = check_inputs(recipe)
    return Scene(setting=setting, folder=folder, recipe=inputs.resolved(recipe), inputs=inputs, other=other)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A running engine. Produced by `serve`."""

    process: EngineProcess
    log: Path
    info: EngineInfo
    seconds: float
    """From the start of its process until it was ready."""
    facts: dict[str, str]
    """See `programs.serving_facts`."""


async def serve(recipe: Recipe, log: Path, *, index: int = 0) -> Serving:
    """Start an engine. Raises RuntimeError in one line, with the cause from its log."""
    process = EngineProcess.local(recipe, index=index, secret=SECRET, log_path=log)
    begin = time.monotonic()
    try:
        info = await process.start()
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0].removesuffix(f"; the end of {log}:")
        raise RuntimeError(f"{first}: {cause(read_log(log))}") from error
    seconds = time.monotonic() - begin
    return Serving(process=process, log=log, info=info, seconds=seconds, facts=serving_facts(read_log(log)))


class Training:
    """One trainer rank: `start`, use `client`, `stop` at any time."""

    def __init__(self, recipe: Recipe, folder: Path, name: str, rendezvous: FolderRendezvous) -> None:
        self._recipe, self._file = recipe, folder / f"{name}.yaml"
        self.log = folder / f"{name}.log"
        self._process: ChildProcess | None = None
        self.client = TrainerClient(
            world_size=1,
            run_id=name,
            incarnation=uuid.uuid4().hex,
            secret=SECRET,
            rendezvous=rendezvous,
            command_timeout_s=recipe.trainer.step_timeout_s,
        )

    async def start(self) -> TrainerInfo:
        """Start the rank and wait until its policy is built. Raises RuntimeError in one line, with the cause."""
        self._file.write_text(dump_recipe(self._recipe), encoding="utf8")
        self._process = await start_rank(self._recipe, self.client, rank=0, recipe_file=self._file, log=self.log)
        ready = asyncio.create_task(self.client.wait_ready(self._recipe.trainer.start_timeout_s))
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise RuntimeError(f"trainer ended with {ended.result()}: {cause(read_log(self.log))}")
            return ready.result()
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def stop(self) -> None:
        """Stop the rank."""
        self.client.close()
        if self._process is not None:
            await stop(self._process, 5.0)

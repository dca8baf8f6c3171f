"""What the engine's checks work on: policies, recipes, prompts, made before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.engine.random_policy import write_dense
from megatron_scalerl.check_gpu.setting import Setting
from megatron_scalerl.check_gpu.tiny_task import fallback_backend, tiny_folder
from megatron_scalerl.controller.preflight import Inputs, check_inputs
from megatron_scalerl.engine.options import check_options
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import Prompt

THINKING, ANSWER = 200, 8
"""Longest cut and answer budget (tokens)."""
CONTEXT = 4096


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Produced by `make_scene`."""

    setting: Setting
    folder: Path
    """Logs, recipes and policies of this part."""
    recipe: Recipe
    """Its policy is the one that the engine loads."""
    inputs: Inputs
    other: Path
    """A policy of the same shape with other weights, which the trainer holds."""

    @property
    def dtype(self) -> str:
        """Of the policies."""
        return self.recipe.policy.dtype

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """At least 8."""
        return self.inputs.prompts.held_out


def engine_options(setting: Setting) -> dict[str, Any]:
    """`engine.vllm` of a small policy beside a trainer on the same device: memory as a number, not as a share."""
    options: dict[str, Any] = {"max_model_len": CONTEXT, "max_num_seqs": 64, "kv_cache_memory_bytes": 128 << 20}
    if not setting.on_gpu:
        return options
    backend = fallback_backend(setting)
    if backend is not None:
        options["attention_backend"] = backend
    return options | {"gpu_memory_utilization": 0.3, "enforce_eager": True, "max_num_batched_tokens": 2048}


def recipe_of(setting: Setting, policy: Path, *, start_s: float, vllm: dict[str, Any], **sections: Any) -> Recipe:
    """A recipe on the tiny task's prompts with `policy`. Raises ValueError for options that cannot be passed on."""
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
        "weights": {"transport": "gloo", "timeout_s": 40},
    }
    check_options(vllm)
    return Recipe.model_validate(
        {"name": "check", "steps": 1} | {k: data.get(k, {}) | sections.get(k, {}) for k in data | sections}
    )


def make_scene(setting: Setting, start_s: float) -> Scene:
    """Write the policies and check the inputs. start_s: for a process to start."""
    folder = setting.scratch / "engine"
    folder.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):  # of an earlier call: processes append to theirs
        log.unlink()
    dtype = "bfloat16" if setting.on_gpu else "float32"
    first, other = (write_dense(folder / f"dense_{seed}", seed=seed, dtype=dtype, toy=setting.toy) for seed in (0, 1))
    recipe = recipe_of(setting, first, start_s=start_s, vllm=engine_options(setting))
    inputs = check_inputs(recipe)
    return Scene(setting=setting, folder=folder, recipe=inputs.resolved(recipe), inputs=inputs, other=other)

"""The tiny task in the scratch folder, shared by the parts engine, loop and parallel; settings of its runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import megatron_scalerl
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.engine.options import check_options
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.tiny.build import TinyArguments, build

RECIPE = "recipes/tiny_cpu.yaml"
SEED = 4
_FALLBACK_FILE = "attention_backend"


def tiny_folder(setting: PartSetting) -> Path:
    """The folder with base_policy/, prompts.jsonl, held_out.jsonl and sft.jsonl; created if missing."""
    folder = setting.scratch / "tiny"
    count = 100 if setting.toy else 1000
    build(folder, TinyArguments(seed=SEED, train_prompts=count, held_out=100, sft_examples=32 * sft_steps(setting)))
    return folder


def sft_steps(setting: PartSetting) -> int:
    """Steps of the warm start, each with 32 new examples."""
    return 30 if setting.toy else 400


def fallback_backend(setting: PartSetting) -> str | None:
    """The attention backend to set because vLLM's default did not start; None: use the default."""
    file = setting.scratch / _FALLBACK_FILE
    return file.read_text(encoding="utf8") if file.exists() else None


def remember_backend(setting: PartSetting, backend: str) -> None:
    """Set the result of `fallback_backend`."""
    (setting.scratch / _FALLBACK_FILE).write_text(backend, encoding="utf8")


def forget_backend(setting: PartSetting) -> None:
    """Remove the fallback of an earlier call."""
    (setting.scratch / _FALLBACK_FILE).unlink(missing_ok=True)


def recipe_path() -> Path:
    """The tiny recipe in the checkout. Raises ValueError if the package is not in a checkout."""
    path = Path(megatron_scalerl.__file__).parents[1] / RECIPE
    if not path.is_file():
        raise ValueError(f"{path}: expected the checkout's recipe, found nothing (run from a checkout)")
    return path


@dataclass(frozen=True, kw_only=True)
class Run:
    """One `train` run."""

    check: str
    overrides: tuple[str, ...]
    steps: int
    limit_s: float
    """Minimum time limit on a GPU; time left by earlier runs is added."""
    on_cpu: bool
    more_s: float = 0.0
    """Assumed additional seconds compared with an eager run."""
    validates: bool = True
    captures: bool = False
    """The engine must capture CUDA graphs."""


def check_overrides(recipe: Path, settings: list[str]) -> None:
    """Raises ValueError for settings that a run would reject."""
    check_options(load_recipe(recipe, settings).engine.vllm)


def common(setting: PartSetting, tiny: Path) -> list[str]:
    """Overrides common to warm start and runs."""
    found = [
        f"seed={SEED}",
        f"output_dir={setting.scratch / 'loop'}",
        f"prompts.path={tiny / 'prompts.jsonl'}",
        f"prompts.held_out_path={tiny / 'held_out.jsonl'}",
        f"sft.path={tiny / 'sft.jsonl'}",
        f"sft.steps={sft_steps(setting)}",
        f"policy.dtype={'bfloat16' if setting.on_gpu else 'float32'}",
    ]
    return found


def overrides(
    setting: PartSetting, tiny: Path, one: Run, *, policy: Path, warm: bool, transport: str = "gloo"
) -> list[str]:
    """Overrides of one run. warm: False also trains groups without a correct answer, so that there are steps.

    transport: of the weights; NCCL does not support two ranks on one GPU.
    """
    steps = 2 if setting.toy else one.steps
    found = [
        *common(setting, tiny),
        f"name={one.check.replace(' ', '_')}",
        f"policy.path={policy}",
        f"steps={steps}",
        f"weights.transport={transport}",
        "weights.probe_every=1",
        "weights.timeout_s=60",
        "checkpoint.every_steps=0",
        "optimizer.warmup_steps=1",
        f"validation.every_steps={steps if one.validates else 0}",
        "engine.start_timeout_s=150",
        "trainer.start_timeout_s=150",
        "trainer.step_timeout_s=100",
        "engine.stall_timeout_s=60",
        "engine.first_token_timeout_s=60",
        *one.overrides,
    ]
    if setting.toy:
        found += [
            "rollouts.groups_per_batch=4",
            "rollouts.group_size=4",
            "rollouts.max_in_flight=32",
            "validation.prompts=8",
            "validation.generations=1",
            "validation.end_generations=1",
        ]
    else:
        found += ["validation.prompts=100", "validation.generations=2", "validation.end_generations=2"]
    if setting.on_gpu:
        found += ["engine.vllm.gpu_memory_utilization=0.3", "rewards.workers=4"]
    if (backend := fallback_backend(setting)) is not None:
        found.append(f"engine.vllm.attention_backend={backend}")
    if setting.toy or not warm:
        found.append("filters.zero_variance=false")
    return found

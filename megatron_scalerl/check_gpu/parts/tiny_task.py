"""The tiny task of the engine's and the loop's checks, made once in the scratch folder."""

from __future__ import annotations

from pathlib import Path

import megatron_scalerl
from megatron_scalerl.check_gpu.setting import Setting
from megatron_scalerl.tiny.build import TinyArguments, build

RECIPE = "recipes/tiny_cpu.yaml"
SEED = 4


def tiny_folder(setting: Setting) -> Path:
    """The folder with base_policy/, prompts.jsonl, held_out.jsonl and sft.jsonl; written if it is not there."""
    folder = setting.scratch / "tiny"
    count = 100 if setting.toy else 1000
    build(folder, TinyArguments(seed=SEED, train_prompts=count, held_out=100, sft_examples=32 * sft_steps(setting)))
    return folder


def sft_steps(setting: Setting) -> int:
    """Steps of the warm start, each with 32 examples of its own."""
    return 30 if setting.toy else 400


def recipe_path() -> Path:
    """The tiny recipe of the checkout. Raises ValueError where the package lies outside of one."""
    path = Path(megatron_scalerl.__file__).parents[1] / RECIPE
    if not path.is_file():
        raise ValueError(f"{path}: expected the checkout's recipe, found nothing (run from a checkout)")
    return path

"""What the engine's and the loop's checks share in the scratch folder: the tiny task, and how engines start here."""

from __future__ import annotations

from pathlib import Path

import megatron_scalerl
from megatron_scalerl.check_gpu.setting import Setting
from megatron_scalerl.tiny.build import TinyArguments, build

RECIPE = "recipes/tiny_cpu.yaml"
SEED = 4
_FALLBACK_FILE = "attention_backend"


def tiny_folder(setting: Setting) -> Path:
    """The folder with base_policy/, prompts.jsonl, held_out.jsonl and sft.jsonl; written if it is not there."""
    folder = setting.scratch / "tiny"
    count = 100 if setting.toy else 1000
    build(folder, TinyArguments(seed=SEED, train_prompts=count, held_out=100, sft_examples=32 * sft_steps(setting)))
    return folder


def sft_steps(setting: Setting) -> int:
    """Steps of the warm start, each with 32 examples of its own."""
    return 30 if setting.toy else 400


def fallback_backend(setting: Setting) -> str | None:
    """The attention backend that engines have to be told, because vLLM's own choice did not start; None: none."""
    file = setting.scratch / _FALLBACK_FILE
    return file.read_text(encoding="utf8") if file.exists() else None


def remember_backend(setting: Setting, backend: str) -> None:
    """What `fallback_backend` answers from now on."""
    (setting.scratch / _FALLBACK_FILE).write_text(backend, encoding="utf8")


def forget_backend(setting: Setting) -> None:
    """Of an earlier call."""
    (setting.scratch / _FALLBACK_FILE).unlink(missing_ok=True)


def recipe_path() -> Path:
    """The tiny recipe of the checkout. Raises ValueError where the package lies outside of one."""
    path = Path(megatron_scalerl.__file__).parents[1] / RECIPE
    if not path.is_file():
        raise ValueError(f"{path}: expected the checkout's recipe, found nothing (run from a checkout)")
    return path

"""Writes the folder of the tiny task: an untrained policy, prompts, and warm-start examples."""

import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_scalerl.record import record
from megatron_scalerl.tiny.task import prompt_rows, warm_start_rows

MANIFEST = "tiny.json"
FORMAT = 2
"""Version of the files, which the manifest states. Raise the version with every change after which equal arguments
give different files."""
RECIPE = Path(__file__).with_name("recipe.yaml")
"""The recipe that `build` copies, with runs/tiny replaced by the folder that is written."""
FILES = ("base_policy/config.json", "prompts.jsonl", "held_out.jsonl", "sft.jsonl")


@record
class TinyArguments:
    """Arguments that determine the folder's content."""

    seed: int
    moe: bool = False
    """True: a Llama-4-style mixture of experts instead of a dense Llama."""
    train_prompts: int = 4000
    held_out: int = 200
    sft_examples: int = 28800
    """Warm-start examples; the default is 900 training steps of 32 examples."""


def build(out_dir: str | Path, arguments: TinyArguments) -> bool:
    """Write the folder atomically; False if the folder exists already and was written with the same arguments.

    Writes base_policy/ (Hugging Face folder), prompts.jsonl and held_out.jsonl (prompt, answer, level), sft.jsonl
    (prompt, completion, level), for the dense policy recipe.yaml, and the manifest tiny.json. Raises ValueError for a
    count below 1 and for a folder with any other content.
    """
    out_dir = Path(out_dir)
    for name in ("train_prompts", "held_out", "sft_examples"):
        count = getattr(arguments, name)
        if count < 1:
            raise ValueError(f"--{name.replace('_', '-')}: {count} is too few; take at least 1")
    manifest = {"format": FORMAT, **asdict(arguments)}
    if _exists(out_dir, manifest):
        return False
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.partial-", dir=out_dir.parent))
    try:
        _write(partial, arguments)
        if not arguments.moe:
            recipe = RECIPE.read_text(encoding="utf8").replace("runs/tiny/", f"{out_dir}/")
            (partial / RECIPE.name).write_text(recipe, encoding="utf8")
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf8")
        partial.chmod(0o755)  # mkdtemp lets the owner alone read the folder
        partial.rename(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _exists(out_dir: Path, manifest: dict[str, Any]) -> bool:
    """True if the folder was written with the arguments of `manifest`; False if the folder is empty or absent. Raises
    ValueError for any other content."""
    if not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir())):
        return False
    try:
        old_manifest = json.loads((out_dir / MANIFEST).read_text(encoding="utf8"))
    except (OSError, json.JSONDecodeError):
        raise ValueError(f"{out_dir}: the folder is not empty and has no {MANIFEST}; name a new folder") from None
    different = [key for key in sorted({*manifest, *old_manifest}) if old_manifest.get(key) != manifest.get(key)]
    if different:
        expected = ", ".join(f"{key} {manifest.get(key)}" for key in different)
        actual = ", ".join(f"{key} {old_manifest.get(key)}" for key in different)
        raise ValueError(f"{out_dir}: it was written with {actual}, not with {expected}; name a new folder")
    missing_files = [name for name in FILES if not (out_dir / name).is_file()]
    if missing_files:
        raise ValueError(f"{out_dir}: {missing_files[0]} is missing; remove the folder, or name a new one")
    return True


def _write(folder: Path, arguments: TinyArguments) -> None:
    # Imported here, since this module imports torch, and `build` needs no torch for a folder that exists.
    from megatron_scalerl.tiny.policy import make_llama, make_llama4

    seed = arguments.seed
    make = {True: make_llama4, False: make_llama}[arguments.moe]
    make(folder / "base_policy", seed)
    _write_rows(folder / "prompts.jsonl", prompt_rows(seed, arguments.train_prompts, held_out=False))
    _write_rows(folder / "held_out.jsonl", prompt_rows(seed, arguments.held_out, held_out=True))
    _write_rows(folder / "sft.jsonl", warm_start_rows(seed, arguments.sft_examples))


def _write_rows(path: Path, rows: Iterable[dict[str, str | int]]) -> None:
    with path.open("w", encoding="utf8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)

"""What travels beside the weights: config, tokenizer, chat template, generation config; and what the config says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import COMMIT
from megatron_scalerl.convert import manifest as manifests
from megatron_scalerl.convert.hf_folder import side_files
from megatron_scalerl.models import read_hf_config

SIDE_FOLDER = "hugging_face"
"""Where a Megatron checkpoint keeps them."""


def policy_config(path: Path) -> Any:
    """A folder's config. Raises ValueError for an architecture that is not known; those that are get listed."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: expected a Hugging Face folder with config.json, found none")
    return read_hf_config(path)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy everything but weights."""
    target.mkdir(exist_ok=True)
    for file in side_files(source):
        if file.name not in (manifests.FILE, COMMIT):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / file, target / file)


def set_config_dtype(folder: Path, dtype: str) -> None:
    """Put the weights' type into a folder's config.json; one that says so already stays as it is."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf8"))
    if _set_dtype(config, dtype):
        write_durably(path, (json.dumps(config, indent=2) + "\n").encode())


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    """True where something changed. A vision tower keeps the type that it says."""
    changed = False
    for part in (config, config.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            if part.get(key, dtype) != dtype:
                part[key], changed = dtype, True
    return changed


def source_marks(path: Path, files: Iterable[str]) -> list[Any]:
    """What changes when a source's files do."""
    stats = [(file, (path / file).stat()) for file in files]
    return [str(path.resolve()), [(file, s.st_size, s.st_mtime_ns, s.st_ino) for file, s in stats]]

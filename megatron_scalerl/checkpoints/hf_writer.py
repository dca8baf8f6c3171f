"""Writes the parts of a Hugging Face folder: safetensors files, their index, the files beside them.

A safetensors file is created in its full size with its header, so that several jobs can fill it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.assembly import Assembly
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import COMMIT
from megatron_scalerl.checkpoints.hf_folder import INDEX
from megatron_scalerl.checkpoints.jobs import SafetensorsJob, grouped

CONVERSION_FILE = "conversion.json"
"""Our record of a conversion (`views.ConversionRecord`), in both kinds of result."""
_WEIGHT_FILES = re.compile(r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|distcp)$|\.index\.json$|^\.")
_SIDE_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor as a safetensors file holds it."""

    dtype: str
    """safetensors' name of the type."""
    shape: tuple[int, ...]
    assembly: Assembly


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsFile:
    """One file to write. Produced by `plan_file`."""

    file: str
    """Path in the work folder."""
    header: bytes
    tensors: tuple[tuple[Assembly, int], ...]
    """(tensor, its first byte in the file)"""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(assembly.nbytes for assembly, _ in self.tensors)

    def create(self, folder: Path) -> None:
        """Create the file in its full size with its header, unless an interrupted conversion did."""
        path = folder / self.file
        if path.is_file() and path.stat().st_size == self.nbytes:
            return
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.nbytes)


def plan_file(file: str, metadata: Mapping[str, str] | None, tensors: Mapping[str, Tensor]) -> SafetensorsFile:
    """A file that holds `tensors` in the given order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    placed: list[tuple[Assembly, int]] = []
    for name, tensor in tensors.items():
        end = offset + tensor.assembly.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        placed.append((tensor.assembly, offset))
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return SafetensorsFile(file=file, header=whole, tensors=tuple((a, len(whole) + at) for a, at in placed))


def fill_jobs(files: Iterable[SafetensorsFile], job_bytes: int, expected: Mapping[str, str]) -> list[SafetensorsJob]:
    """Jobs of about `job_bytes` that write the files' tensors, whose checksums must be the `expected` ones."""
    jobs = []
    for file in files:
        for tensors in grouped(file.tensors, lambda placed: placed[0].nbytes, job_bytes):
            known = {a.name: expected[a.name] for a, _ in tensors if a.name in expected}
            jobs.append(SafetensorsJob(file=file.file, tensors=tensors, expected=known))
    return jobs


def write_index(folder: Path, metadata: Mapping[str, Any], files: Iterable[SafetensorsFile]) -> None:
    """Write the index of the folder's safetensors files."""
    placed = {assembly.name: (file.file, assembly.nbytes) for file in files for assembly, _ in file.tensors}
    index = {
        "metadata": {**metadata, "total_size": sum(nbytes for _, nbytes in placed.values())},
        "weight_map": {name: file for name, (file, _) in placed.items()},
    }
    write_durably(folder / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def copy_side_files(source: Path, target: Path) -> None:
    """Copy everything but weights: config, tokenizer, chat templates, generation config."""
    target.mkdir(exist_ok=True)
    found = [f for f in sorted(source.iterdir()) if f.is_file() and not _WEIGHT_FILES.search(f.name)]
    for folder in _SIDE_FOLDERS:
        found += [f for f in sorted((source / folder).rglob("*")) if f.is_file()]
    for file in found:
        if file.name not in (CONVERSION_FILE, COMMIT):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)


def set_config_dtype(folder: Path, dtype: str) -> None:
    """Set the weights' type in a folder's config.json; a config with this type is not rewritten."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf8"))
    changed = False
    # A vision tower keeps the type of its own section.
    for part in (config, config.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            if part.get(key, dtype) != dtype:
                part[key], changed = dtype, True
    if changed:
        write_durably(path, (json.dumps(config, indent=2) + "\n").encode())


def add_generation_keys(folder: Path, keys: Mapping[str, Any]) -> None:
    """Add `keys` (`Family.generation_config`) to a folder's generation_config.json.

    A missing file is created with the special tokens of config.json: readers of the one ignore the other.
    """
    if not keys:
        return
    path = folder / "generation_config.json"
    if path.is_file():
        found = json.loads(path.read_text())
        # transformers ignores unknown keys if this one is set
        found.pop("_from_model_config", None)
    else:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        found = {key: text[key] for key in special if text.get(key) is not None}
    path.write_text(json.dumps({**found, **keys}, indent=2) + "\n")

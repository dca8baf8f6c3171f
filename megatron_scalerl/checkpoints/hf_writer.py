"""Writers of a Hugging Face folder's parts: safetensors files, index, config, tokenizer and other files."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.assembly import Assembly
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import COMMIT
from megatron_scalerl.checkpoints.conversion import Copier, new_file
from megatron_scalerl.checkpoints.hf_folder import INDEX, Shard

CONVERSION_FILE = "conversion.json"
"""File with the record of a conversion (`views.ConversionRecord`), in the Megatron or Hugging Face folder that
results."""
_WEIGHT_FILES = re.compile(r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|distcp)$|\.index\.json$|^\.")
_SIDE_FOLDERS = ("additional_chat_templates",)


def write_shard(
    folder: Path, shard: Shard, tensors: Mapping[str, Assembly], copier: Copier, passthrough: tuple[str, ...]
) -> dict[str, str]:
    """Write a safetensors file with the shard's tensors, in order, and return checksums by the tensors' names.

    passthrough: names of tensors that need not be finite. Raises ValueError as `Copier.write` and `new_file` do.
    """
    header: dict[str, object] = {}
    if shard.metadata:
        header["__metadata__"] = dict(shard.metadata)
    offset = 0
    for name in shard.tensors:
        tensor = tensors[name]
        end = offset + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The tensors start at a multiple of 8 bytes, as in files by safetensors' own writer.
    text += b" " * (-len(text) % 8)
    with new_file(folder / shard.file) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        return {n: copier.write(file, tensors[n], policy=n not in passthrough) for n in shard.tensors}


def write_index(
    folder: Path, metadata: Mapping[str, Any], shards: tuple[Shard, ...], tensors: Mapping[str, Assembly]
) -> None:
    """Write INDEX: `metadata`, and for each tensor the safetensors file that holds the tensor."""
    placed = {name: shard.file for shard in shards for name in shard.tensors}
    index = {
        "metadata": {**metadata, "total_size": sum(tensors[name].nbytes for name in placed)},
        "weight_map": placed,
    }
    write_durably(folder / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def copy_side_files(source: Path, target: Path) -> None:
    """Copy a folder's files except weights, indices and hidden files: config, tokenizer, chat templates, generation
    config ..."""
    target.mkdir(exist_ok=True)
    files = [f for f in sorted(source.iterdir()) if f.is_file() and not _WEIGHT_FILES.search(f.name)]
    for folder in _SIDE_FOLDERS:
        files += [f for f in sorted((source / folder).rglob("*")) if f.is_file()]
    for file in files:
        if file.name not in (CONVERSION_FILE, COMMIT):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)


def set_config_dtype(folder: Path, dtype: str) -> None:
    """Set the weights' type in a folder's config.json. A config that already has this type is not rewritten."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf8"))
    changed = False
    # A vision tower's section is not changed: the tower's weights keep the type.
    for part in (config, config.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            if part.get(key, dtype) != dtype:
                part[key] = dtype
                changed = True
    if changed:
        write_durably(path, (json.dumps(config, indent=2) + "\n").encode())


def add_generation_keys(folder: Path, keys: Mapping[str, Any]) -> None:
    """Add `keys` (`Family.generation_config`) to a folder's generation_config.json.

    A missing file is created with the special tokens of config.json, because readers that find a
    generation_config.json take no special tokens from config.json.
    """
    if not keys:
        return
    path = folder / "generation_config.json"
    if path.is_file():
        content = json.loads(path.read_text())
        # transformers ignores unknown keys if `_from_model_config` is set.
        content.pop("_from_model_config", None)
    else:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        content = {key: text[key] for key in special if text.get(key) is not None}
    path.write_text(json.dumps({**content, **keys}, indent=2) + "\n")

"""Hugging Face folders: slices read from safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_scalerl.models import Family, family, read_hf_config
from megatron_scalerl.models.family import Index

INDEX = "model.safetensors.index.json"


class HfReader:
    """Reads rectangles of the tensors in a Hugging Face folder.

    Raises ValueError for a folder without safetensors and for an index that names a missing file.
    """

    def __init__(self, hf_path: str | Path):
        self.path = Path(hf_path)
        self._open: dict[Path, Any] = {}
        self._file_of = self._files()

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of the folder."""
        return tuple(self._file_of)

    def read(self, name: str, index: tuple[Index, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The rectangle `index` of tensor `name`, whose full shape must be `shape`."""
        if name not in self._file_of:
            raise ValueError(f"{self.path}: expected tensor {name}, found none of that name")
        view = self._file(self._file_of[name]).get_slice(name)
        if tuple(view.get_shape()) != tuple(shape):
            raise ValueError(f"{self.path}: {name}: expected shape {list(shape)}, found {view.get_shape()}")
        ranges = tuple(slice(i, i + 1) if isinstance(i, int) else i for i in index)
        dropped = tuple(dim for dim, i in enumerate(index) if isinstance(i, int))
        return view[ranges].squeeze(dropped)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _files(self) -> dict[str, Path]:
        index = self.path / INDEX
        if index.is_file():
            entries = json.loads(index.read_text())["weight_map"]
            for file in sorted(set(entries.values())):
                if not (self.path / file).is_file():
                    raise ValueError(f"{index}: expected file {file}, found none")
            return {name: self.path / file for name, file in entries.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.path}: expected *.safetensors, found none")
        return {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118


def add_generation_keys(folder: Path, keys: Mapping[str, Any]) -> None:
    """Puts `keys` (`Family.generation_config`) into a folder's generation_config.json.

    A folder without one gets one that keeps the special tokens of config.json: readers then look there no more.
    """
    if not keys:
        return
    path = folder / "generation_config.json"
    if path.is_file():
        found = json.loads(path.read_text())
        # transformers ignores keys that it does not know where this one is set
        found.pop("_from_model_config", None)
    else:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        found = {key: text[key] for key in special if text.get(key) is not None}
    path.write_text(json.dumps({**found, **keys}, indent=2) + "\n")


def family_of_folder(hf_path: str | Path) -> Family:
    """The Family of a Hugging Face folder, in the layout that its tensors have; without any, the usual one.

    Raises ValueError.
    """
    stored = any(Path(hf_path).glob("*.safetensors"))
    return family(read_hf_config(hf_path), HfReader(hf_path).names if stored else ())

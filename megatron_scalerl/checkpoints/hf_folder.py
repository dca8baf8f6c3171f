"""Hugging Face folders: slices read from safetensors, and a folder written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_scalerl.checkpoints.manifest import Manifest
from megatron_scalerl.models import Family, family, read_hf_config
from megatron_scalerl.models.family import Index

SHARD_BYTES = 4 << 30
"""Largest safetensors file that is written."""
INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


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

    def whole(self, name: str) -> torch.Tensor:
        """All of one tensor."""
        return self._file(self._file_of[name]).get_tensor(name)

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


class HfWriter(AbstractContextManager["HfWriter"]):
    """Writes a policy's folder beside its place and moves it there when everything is in it.

    `carried` tensors are copied from the source folder; `generation` keys go into generation_config.json. Raises
    ValueError where the place is taken by something that is no Hugging Face folder; an older one is replaced.
    """

    def __init__(
        self,
        source: str | Path,
        out: str | Path,
        manifest: Manifest,
        *,
        carried: tuple[str, ...] = (),
        generation: Mapping[str, Any] | None = None,
    ):
        self.source, self.out = Path(source), Path(out)
        self._generation = dict(generation or {})
        if self.out.exists() and not (self.out / "config.json").is_file():
            raise ValueError(f"{self.out}: expected no such path or a Hugging Face folder, found something else")
        self._carried = carried
        self._shard_of, self._left = _plan(manifest)
        self._shards = len(self._left)
        self._pending: dict[int, dict[str, torch.Tensor]] = {shard: {} for shard in self._left}
        self._index: dict[str, str] = {}
        self._bytes = 0
        self._dtype = manifest[0].dtype
        self._work = self.out.with_name(f".{self.out.name}.{os.getpid()}.partial")

    def __enter__(self) -> "HfWriter":
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            return
        assert not any(self._left.values()), "not every tensor of the manifest was added"
        self._carry()
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._index}
        if len(set(self._index.values())) > 1:
            (self._work / INDEX).write_text(json.dumps(index, indent=2))
        self._copy_files()
        self._publish()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor of the manifest, in any order; a shard is written when it is full."""
        shard = self._shard_of[name]
        self._pending[shard][name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._left[shard] -= 1
        if self._left[shard] == 0:
            file = "model.safetensors" if self._shards == 1 and not self._carried else self._file_name(shard)
            self._write(file, self._pending.pop(shard))

    def _file_name(self, shard: int) -> str:
        return f"model-{shard + 1:05d}-of-{self._shards:05d}.safetensors"

    def _write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self._work / file, metadata={"format": "pt"})
        self._index |= dict.fromkeys(tensors, file)
        self._bytes += sum(t.numel() * t.element_size() for t in tensors.values())

    def _carry(self) -> None:
        if not self._carried:
            return
        reader = HfReader(self.source)
        names = [name for name in reader.names if name.startswith(self._carried)]
        if names:
            self._write("model-carried.safetensors", {name: reader.whole(name) for name in names})

    def _copy_files(self) -> None:
        for file in sorted(self.source.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and not file.name.endswith(".index.json"):
                shutil.copy2(file, self._work / file.name)
        path = self._work / "config.json"
        config = json.loads(path.read_text())
        for part in (config, config.get("text_config") or {}):
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = self._dtype
        path.write_text(json.dumps(config, indent=2) + "\n")
        add_generation_keys(self._work, self._generation)

    def _publish(self) -> None:
        old = self._work.with_suffix(".replaced")
        if self.out.exists():
            self.out.rename(old)
        self._work.rename(self.out)
        shutil.rmtree(old, ignore_errors=True)


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


def _plan(manifest: Manifest) -> tuple[dict[str, int], dict[int, int]]:
    """Shard of each tensor, and number of tensors in each shard."""
    shard_of: dict[str, int] = {}
    left: dict[int, int] = {}
    shard, size = 0, 0
    for meta in manifest:
        if size and size + meta.nbytes > SHARD_BYTES:
            shard, size = shard + 1, 0
        size += meta.nbytes
        shard_of[meta.name] = shard
        left[shard] = left.get(shard, 0) + 1
    return shard_of, left


def family_of_folder(hf_path: str | Path) -> Family:
    """The Family of a Hugging Face folder, in the layout that its tensors have; without any, the usual one.

    Raises ValueError.
    """
    stored = any(Path(hf_path).glob("*.safetensors"))
    return family(read_hf_config(hf_path), HfReader(hf_path).names if stored else ())

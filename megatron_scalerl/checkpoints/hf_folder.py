"""Opens Hugging Face folders: checks safetensors headers, and reads tensors through memory maps.

The module also describes Megatron-Core's parameter names: patterns that find the numbers of layers and experts, and
Transformer Engine's names for norms, all from megatron-core's source. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from megatron_scalerl.checkpoints.plain_files import MappedFile, check_name
from megatron_scalerl.record import record

if TYPE_CHECKING:
    import torch

    from megatron_scalerl.models.family import Family, Index


INDEX = "model.safetensors.index.json"
ITEM_BYTES = {
    **dict.fromkeys(("I64", "U64", "F64"), 8),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I16", "U16", "BF16", "F16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""safetensors' name of a type -> bytes of one element."""
_TORCH_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@record
class HfTensor:
    """A tensor of a safetensors file."""

    name: str
    file: str
    dtype: str
    """Type of the elements by safetensors' name: BF16, F32 ..."""
    shape: tuple[int, ...]
    offset: int
    """Position of the tensor's first byte in the file."""
    nbytes: int


@record
class Shard:
    """A safetensors file of a Hugging Face folder."""

    file: str
    metadata: Mapping[str, str] | None
    """The entry `__metadata__` in the header of the file; None: the header has no such entry."""
    tensors: tuple[str, ...]
    """Names of the tensors, in the order of their bytes."""


@record
class HfFolder:
    """The tensors of a Hugging Face folder, and the file that holds each. Produced by `open_folder`."""

    path: Path
    tensors: Mapping[str, HfTensor]
    shards: tuple[Shard, ...]
    index_metadata: Mapping[str, Any] | None
    """The metadata of the index file; None for a folder without an index."""


def open_folder(path: str | Path) -> HfFolder:
    """Read and check the headers of all safetensors files in a folder.

    Raises ValueError if the folder has no safetensors files, a file of the index is missing, a file's size differs
    from the header's, a header cannot be read, the index places a tensor in a file that lacks the tensor, or two
    files hold tensors of one name.
    """
    path = Path(path)
    index = path / INDEX
    index_metadata: dict[str, Any] | None = None
    weight_map: dict[str, str] = {}
    files = {file.name for file in path.glob("*.safetensors")}
    # As in transformers, a safetensors file that the index does not name is no part of the model.
    if index.is_file():
        index_metadata, weight_map = _read_index(index)
        files = set(weight_map.values())
    if not files:
        raise ValueError(
            f"{path}: the folder has no *.safetensors files; weights of another kind, such as GGUF, have to be "
            "converted: docs/checkpoints.md#gguf"
        )
    tensors: dict[str, HfTensor] = {}
    shards = []
    for file in sorted(files):
        if not (path / file).is_file():
            raise ValueError(f"{path / file}: this file is missing, although {INDEX} lists it")
        metadata, in_file = read_header(path / file)
        for tensor in in_file:
            if tensor.name in tensors:
                earlier_file = tensors[tensor.name].file
                raise ValueError(
                    f"{path / file}: the tensor {tensor.name} is also in {earlier_file}; delete one of the files"
                )
            tensors[tensor.name] = tensor
        shards.append(Shard(file=file, metadata=metadata, tensors=tuple(tensor.name for tensor in in_file)))
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise ValueError(f"{index}: {file} does not contain the tensor {name}, although the index says so")
    return HfFolder(path=path, tensors=tensors, shards=tuple(shards), index_metadata=index_metadata)


def _read_index(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        content = json.loads(path.read_text(encoding="utf8"))
        entries: dict[str, str] = content["weight_map"]
        if not isinstance(entries, dict):
            raise TypeError("the weight_map is not a JSON object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: the index is not a JSON object with a weight_map: {error!r}") from None
    for file in entries.values():
        check_name(path, file)
    return content.get("metadata") or {}, entries


def read_header(path: Path) -> tuple[Mapping[str, str] | None, list[HfTensor]]:
    """Return (metadata, tensors in the order of bytes) from the header of a safetensors file.

    Raises ValueError for a file that safetensors refuses, and for a type that is not in ITEM_BYTES.
    """
    tensors = []
    with path.open("rb") as file:
        offset = 8 + int.from_bytes(file.read(8), "little")
    try:
        # safe_open checks that the tensors fill the rest of the file, without overlaps and holes.
        with safe_open(path, "numpy") as header:
            for name in header.offset_keys():
                entry = header.get_slice(name)
                dtype = entry.get_dtype()
                shape = tuple(entry.get_shape())
                if dtype not in ITEM_BYTES:
                    raise ValueError(
                        f"{path}: {name}: the type {dtype} is not supported, only {', '.join(ITEM_BYTES)}"
                    )
                nbytes = prod(shape) * ITEM_BYTES[dtype]
                tensors.append(
                    HfTensor(name=name, file=path.name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes)
                )
                offset += nbytes
            return header.metadata(), tensors
    except SafetensorError as error:
        raise ValueError(f"{path}: this is not a complete safetensors file: {error}") from None


class HfReader:
    """Reads the tensors of a folder from memory-mapped files."""

    def __init__(self, folder: HfFolder):
        self.folder = folder
        self._mapped = cache(lambda file: MappedFile(folder.path / file))

    def bits(self, name: str) -> np.ndarray:
        """The bits of a tensor as unsigned integers in the tensor's shape, read-only and not copied."""
        tensor = self.folder.tensors[name]
        size = ITEM_BYTES[tensor.dtype]
        file = self._mapped(tensor.file)
        return file.array(tensor.offset, tensor.nbytes // size, np.dtype(f"u{size}")).reshape(tensor.shape)

    def read(self, name: str, index: tuple[Index, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A copy of `tensor[index]`. An int in `index` drops a dimension.

        shape: full shape that the tensor must have. Raises ValueError for a tensor that is missing, has a shape other
        than `shape`, or has no float type.
        """
        import torch

        tensor = self.folder.tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self.folder.path}: the folder has no tensor {name}")
        head = f"{self.folder.path / tensor.file}: {name}"
        if tensor.shape != tuple(shape):
            raise ValueError(f"{head}: the tensor has shape {list(tensor.shape)}, but the config says {list(shape)}")
        if tensor.dtype not in _TORCH_FLOATS:
            raise ValueError(f"{head}: the type {tensor.dtype} is not supported, only {', '.join(_TORCH_FLOATS)}")
        # The mapped file is read-only, but torch's tensors are writable, so the bits are copied.
        bits = torch.from_numpy(self.bits(name)[index].copy())
        return bits.view(getattr(torch, _TORCH_FLOATS[tensor.dtype]))


def family_of_folder(hf_path: str | Path) -> Family:
    """The Family of a Hugging Face folder. Raises ValueError as `read_hf_config` and `open_folder`.

    If Hugging Face's format has two layouts for the model, the names of the folder's tensors decide; in a folder
    without weights the usual layout is taken.
    """
    from megatron_scalerl.models import family, read_hf_config

    config = read_hf_config(hf_path)
    if any(Path(hf_path).glob("*.safetensors")):
        return family(config, open_folder(hf_path).tensors)
    return family(config)


LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
"""Finds the number of an expert in a parameter name of Megatron's own layers (without TE), where each expert is a
module."""
GROUPED_EXPERT = re.compile(r"\.experts\.linear_fc([12])\.weight(\d+)$")
"""Finds (projection, expert) in a parameter name of Transformer Engine's grouped linear layer."""
FUSED_NORMS = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
"""Name of a norm in Megatron's own layers -> name in Transformer Engine's, where the next linear layer contains the
norm."""

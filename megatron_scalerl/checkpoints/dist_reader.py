"""Reads Megatron's `torch_dist` checkpoints: where each parameter is stored, and the stored chunks as arrays.

The rules for addresses come from megatron-core's source (transformer_block.py and moe/experts.py,
`sharded_state_dict`), and do not depend on the parallel layout of the save. A test compares addresses with a
checkpoint that Megatron-Core saved. Layers of one kind are stacked along a leading axis; in a model with several
kinds of layers, the key has the layer's number. Experts are stacked along the next axis. Norms before a linear layer
have Transformer Engine's names. Every linear layer has an object `_extra_state`, empty unless fp8 is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_scalerl.checkpoints.assembly import BITS, HF_NAMES
from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.checkpoints.hf_folder import EXPERT, FUSED_NORMS, LAYER
from megatron_scalerl.checkpoints.plain_files import MappedFile, open_plain
from megatron_scalerl.checkpoints.safe_index import Chunk, StoredTensor, read_index
from megatron_scalerl.processes.logs import listed
from megatron_scalerl.record import record

if TYPE_CHECKING:
    from megatron_scalerl.models.family import Family, Rule

_LINEAR = re.compile(r"\.(linear_qkv|linear_proj|linear_fc[12]|linear_(q|kv)(_down|_up)?_proj)\.weight$")
_TE_MODULES = re.compile(r"(\.(q|k|kv|input|pre_mlp)_layernorm|final_layernorm)\.weight$")
"""Norms that have an `_extra_state` if Transformer Engine's layers are used, and none in Megatron's own layers. From
Transformer Engine's source; no test has run Transformer Engine."""


@record
class Address:
    """The place of a parameter in a checkpoint: tensor[offset] of the tensor called `key`."""

    key: str
    offset: tuple[int, ...]
    """The parameter's index on the leading axes: number of the layer, of the expert, or both; () if the tensor has no
    leading axes."""
    sizes: tuple[int, ...]
    """Lengths of the leading axes: how many layers, experts, or both are stacked."""


def addresses(rule: Rule, family: Family) -> tuple[Address, ...]:
    """The two addresses that `rule`'s parameter may have in a checkpoint: the layers stacked along an axis, or the
    layer's number in the key. `to_megatron` writes the first."""
    name = _key(rule, family)
    frequency = family.transformer.get("moe_layer_freq", 1)
    stacked = isinstance(frequency, int) and frequency <= 1
    return tuple(dict.fromkeys(_address(family, name, stacked=s) for s in (stacked, not stacked)))


def extra_states(family: Family) -> Iterator[str]:
    """Yield the keys of the empty extra states that Megatron-Core's own load expects in addition to the tensors."""
    for rule in family.rules:
        if not rule.exported:
            continue
        address = addresses(rule, family)[0]
        if _LINEAR.search(address.key) or _TE_MODULES.search(address.key):
            yield _object_key(address.key.removesuffix("weight"), address)
        attention, _, layer = address.key.removesuffix(".weight").rpartition(".")
        if layer in ("linear_qkv", "linear_kv_up_proj"):
            yield _object_key(f"{attention}.core_attention.", address)


def _object_key(module: str, address: Address) -> str:
    offset = ".".join(map(str, address.offset or (0,)))
    sizes = ".".join(map(str, address.sizes or (1,)))
    return f"{module}_extra_state/shard_{offset}_{sizes}"


def _key(rule: Rule, family: Family) -> str:
    """Name of the parameter in checkpoints, still with the numbers of layer and expert that stacking removes."""
    for plain_name, fused_name in FUSED_NORMS.items():
        # Transformer Engine fuses no norm into experts, so the norm before experts has the name that Megatron's plain
        # layers use.
        unfused = plain_name.startswith(".pre_mlp") and family.layers[rule.layer].moe
        # In latent attention two linear layers follow the norm, so the norm is fused into neither.
        unfused |= plain_name.startswith(".input") and family.transformer.get("multi_latent_attention", False)
        if rule.megatron.endswith(plain_name) and not unfused:
            return rule.megatron.removesuffix(plain_name) + fused_name
    return rule.megatron


def _address(family: Family, name: str, *, stacked: bool) -> Address:
    offset: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    layer = LAYER.match(name)
    if layer is not None and stacked:
        name = f"decoder.layers.{name[layer.end() :]}"
        offset = (int(layer[1]),)
        sizes = (len(family.layers),)
    expert = EXPERT.search(name)
    if expert is not None:
        name = EXPERT.sub(".experts.experts.", name)
        offset += (int(expert[1]),)
        sizes += (int(family.transformer["num_moe_experts"]),)
    return Address(key=name, offset=offset, sizes=sizes)


@record
class StoredParameter:
    """Where and how a checkpoint stores one parameter."""

    address: Address
    dtype: str
    """Type of the elements by safetensors' name: F32, BF16 or F16."""
    shape: tuple[int, ...]
    """Shape of the parameter, without leading axes and without the rows that pad a vocabulary."""
    chunks: tuple[Chunk, ...]
    """The chunks of the stacked tensor that contain elements of the parameter."""


def stored_parameters(
    path: Path, family: Family, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredParameter]:
    """Find every exported parameter of the family in the checkpoint at `path`. Returns Megatron's name -> parameter.

    shapes: the parameters' full shapes. Raises ValueError for a folder that is not a complete checkpoint, and for
    parameters that are missing (all are listed) or whose shape differs from `shapes`.
    """
    if (path / COMMIT).is_file():
        read_commit(path)
    index = read_index(path)
    stored = {}
    missing_keys = []
    for rule in family.rules:
        if not rule.exported:
            continue
        candidates = addresses(rule, family)
        address = next((a for a in candidates if a.key in index.tensors), None)
        if address is None:
            missing_keys.append(candidates[0].key)
            continue
        stored[rule.megatron] = _stored(path, rule, address, index.tensors[address.key], shapes[rule.megatron])
    if missing_keys:
        raise ValueError(f"{path}: the checkpoint lacks parameters of this policy: {listed(missing_keys)}")
    return stored


def _stored(
    path: Path, rule: Rule, address: Address, tensor: StoredTensor, shape: tuple[int, ...]
) -> StoredParameter:
    if tensor.dtype not in HF_NAMES:
        raise ValueError(
            f"{path}: {address.key}: weights of type {tensor.dtype} are not supported, only {', '.join(HF_NAMES)}"
        )
    expected = (*address.sizes, *shape)
    if tensor.shape != expected:
        # Megatron pads a vocabulary for tensor parallelism, so an embedding or a head may have more rows than the
        # config says.
        vocabulary = rule.place != "layer" and rule.sharded
        if not vocabulary or tensor.shape[1:] != expected[1:] or tensor.shape[0] < expected[0]:
            shapes = f"the checkpoint has shape {list(tensor.shape)}, but the config says {list(expected)}"
            raise ValueError(f"{path}: {address.key}: {shapes}")
    # The leading axes choose the layer and the expert; the parameter's own axes follow.
    lead = len(address.offset)
    chunks = tuple(c for c in tensor.chunks if _overlaps(c, address.offset, shape[0], lead))
    elements = sum(_elements(c, shape, lead) for c in chunks)
    # Chunks of a checkpoint do not overlap, so no element is missing if the number of elements is right.
    if elements != prod(shape):
        raise ValueError(
            f"{path}: the checkpoint is damaged: {address.key} has {elements} stored elements, not {prod(shape)}"
        )
    return StoredParameter(address=address, dtype=HF_NAMES[tensor.dtype], shape=shape, chunks=chunks)


def _overlaps(chunk: Chunk, offset: tuple[int, ...], rows: int, lead: int) -> bool:
    inside = all(o <= at < o + n for at, o, n in zip(offset, chunk.offset, chunk.shape))
    return inside and chunk.offset[lead] < rows


def _elements(chunk: Chunk, shape: tuple[int, ...], lead: int) -> int:
    """Number of the parameter's elements in a chunk, without the rows that pad a vocabulary."""
    ends = zip(chunk.offset[lead:], chunk.shape[lead:], shape)
    return prod(min(o + n, size) - o for o, n, size in ends)


class DistReader:
    """Reads chunks of a checkpoint as arrays of bits, mapped from files. Callers name a chunk by `chunk_name`."""

    def __init__(self, path: Path, parameters: Mapping[str, StoredParameter]):
        self.parameters = parameters
        self._path = path
        self._mapped = cache(lambda file: MappedFile(path / file, open_plain(path, file)))
        self.bits = cache(self._read)
        """bits(name): the part of a chunk that belongs to the parameter's layer and expert, without the leading
        axes."""

    def _read(self, name: str) -> np.ndarray:
        # safe_values imports torch, and so is imported only on use.
        from megatron_scalerl.checkpoints.safe_values import find_tensor

        parameter, number = name.rsplit("#", 1)
        stored = self.parameters[parameter]
        chunk = stored.chunks[int(number)]
        dtype, shape, start = find_tensor(self._path, chunk.place)  # refuses a symbolic link
        file = self._mapped(chunk.place.file)
        if (dtype, shape) != (stored.dtype, chunk.shape):
            head = f"{file.path}: {stored.address.key}"
            indexed = f"{stored.dtype} {list(chunk.shape)}"
            raise ValueError(f"{head}: the file has a chunk of {dtype} {list(shape)}, but .metadata says {indexed}")
        chunk_bits = file.array(start, prod(shape), BITS[dtype]).reshape(shape)
        return chunk_bits[tuple(at - first for at, first in zip(stored.address.offset, chunk.offset))]


def chunk_name(parameter: str, number: int) -> str:
    """The name that `DistReader` gives to the `number`-th chunk of a parameter."""
    return f"{parameter}#{number}"

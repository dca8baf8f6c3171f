"""The manifest of a weight update: which parameters are sent, in which order, packed into which buckets.

Trainer and engines agree on one manifest when they connect; an update then sends bytes only. Names and shapes are
those of the Hugging Face checkpoint, ordered layer by layer, because the engine buffers the parts of a layer until
the layer is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Annotated

import msgspec

BUCKET_MIB = 64
ALIGNMENT = 16
"""Every parameter starts at a multiple of this many bytes in its bucket, so that it can be viewed in its type."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamMeta:
    """One parameter as it is sent."""

    name: str
    """Name in the Hugging Face checkpoint."""
    dtype: str
    """float32, bfloat16 ..."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size on the wire without padding."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one parameter in its bucket."""

    meta: ParamMeta
    offset: int
    """First byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Parameters that are sent as one buffer."""

    slots: tuple[Slot, ...]
    nbytes: int
    """Size of the buffer, padding included; a multiple of the alignment."""


Manifest = tuple[ParamMeta, ...]


def manifest_of(items: Iterable[tuple[str, str, Iterable[int]]]) -> Manifest:
    """A manifest from (name, dtype, shape) in the order of sending.

    Raises ValueError for an empty manifest, a duplicate name, and a type that cannot be sent.
    """
    manifest = tuple(ParamMeta(name=n, dtype=d, shape=tuple(s)) for n, d, s in items)
    if not manifest:
        raise ValueError("weights: expected at least one parameter, found none")
    seen: set[str] = set()
    for meta in manifest:
        if meta.name in seen:
            raise ValueError(f"weights: expected every name once, found {meta.name} twice")
        if meta.dtype not in _ITEM_BYTES:
            raise ValueError(f"weights: {meta.name}: expected one of {sorted(_ITEM_BYTES)}, found {meta.dtype}")
        seen.add(meta.name)
    return manifest


def manifest_digest(manifest: Manifest) -> str:
    """Fingerprint of names, types, shapes and order (hex)."""
    return hashlib.sha256(to_json(manifest).encode()).hexdigest()


def to_json(manifest: Manifest) -> str:
    """[[name, dtype, shape], ...]"""
    return json.dumps([[m.name, m.dtype, list(m.shape)] for m in manifest])


def from_json(text: str) -> Manifest:
    """Inverse of `to_json`. Raises ValueError."""
    try:
        rows = msgspec.json.decode(text, type=list[tuple[str, str, list[Annotated[int, msgspec.Meta(ge=0)]]]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"weights: expected a list of name, dtype and shape, found {error}") from None
    return manifest_of(rows)


def buckets(manifest: Manifest, bucket_mib: int = BUCKET_MIB) -> Iterator[Bucket]:
    """Pack the manifest in its order; a parameter larger than a bucket gets its own."""
    limit, offset = bucket_mib << 20, 0
    slots: list[Slot] = []
    for meta in manifest:
        size = -(-meta.nbytes // ALIGNMENT) * ALIGNMENT
        if slots and offset + size > limit:
            yield Bucket(slots=tuple(slots), nbytes=offset)
            slots, offset = [], 0
        slots.append(Slot(meta=meta, offset=offset))
        offset += size
    yield Bucket(slots=tuple(slots), nbytes=offset)

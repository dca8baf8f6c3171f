"""`conversion.json`: every tensor with its checksum, and how the Hugging Face folder was laid out.

It travels in both kinds of result. Checksums are xxh3_64 of a tensor's bytes in Hugging Face's orientation, so that
they are the same on both sides; the way back compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.convert.hf_folder import Shard
from megatron_scalerl.convert.jobs import Record

FILE = "conversion.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a conversion wrote."""

    tensors: Mapping[str, Mapping[str, Any]]
    """Name -> dtype (safetensors' name), shape, checksum."""
    shards: tuple[Shard, ...]
    """Files of the Hugging Face folder."""
    index_metadata: Mapping[str, Any] | None
    """Metadata of its index; None where it has no index."""
    copies: Mapping[str, str]
    """Tensors that repeat another one."""
    carried: tuple[str, ...]
    """Tensors outside the policy."""


def to_bytes(manifest: Manifest) -> bytes:
    """The file's content."""
    data = {"format": _FORMAT, "checksum": "xxh3_64", **asdict(manifest)}
    return (json.dumps(data, indent=1) + "\n").encode()


def read(path: str | Path) -> Manifest | None:
    """The manifest in a folder, None where there is none. Raises ValueError for one that cannot be read."""
    file = Path(path) / FILE
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: expected JSON, found {error}") from None
    if data.pop("format", None) != _FORMAT:
        raise ValueError(f"{file}: expected a manifest of format {_FORMAT}, found another")
    del data["checksum"]
    shards = tuple(Shard(**{**shard, "tensors": tuple(shard["tensors"])}) for shard in data.pop("shards"))
    return Manifest(shards=shards, **{**data, "carried": tuple(data["carried"])})


def checksums(records: Iterable[Record]) -> dict[str, str]:
    """Of all tensors, from the records of all jobs."""
    return {name: value for record in records for name, value in record["checksums"].items()}

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
from megatron_scalerl.safe_load.files import check_name

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
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: expected JSON, found {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{file}: expected a manifest of format {_FORMAT}, found another")
    try:
        return _manifest(file, data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected a manifest of format {_FORMAT}, found one with {error!r}") from None


def _manifest(file: Path, data: dict[str, Any]) -> Manifest:
    shards = tuple(Shard(**{**shard, "tensors": tuple(shard["tensors"])}) for shard in data["shards"])
    for shard in shards:
        check_name(file, shard.file)
        if not shard.file.endswith(".safetensors"):
            raise ValueError(f"{file}: expected files *.safetensors, found {shard.file}")
    for name in ("tensors", "copies"):
        if not isinstance(data[name], dict):
            raise TypeError(f"{name} that are a {type(data[name]).__name__}")
    for entry in data["tensors"].values():
        _ = entry["dtype"], entry["shape"], entry["checksum"]
    if not isinstance(data["index_metadata"], dict | None):
        raise TypeError("index_metadata that is no dictionary")
    return Manifest(
        tensors=data["tensors"],
        shards=shards,
        index_metadata=data["index_metadata"],
        copies=data["copies"],
        carried=tuple(data["carried"]),
    )


def checksums(records: Iterable[Record]) -> dict[str, str]:
    """Of all tensors, from the records of all jobs."""
    return {name: value for record in records for name, value in record["checksums"].items()}

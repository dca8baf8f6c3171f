"""safetensors files to be written: header, size, every tensor's place, and the jobs that fill them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.convert.jobs import SafetensorsJob
from megatron_scalerl.convert.pieces import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor as a safetensors file holds it."""

    dtype: str
    """safetensors' name of the type."""
    shape: tuple[int, ...]
    recipe: Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """One file to be written."""

    file: str
    """Path in the work folder."""
    header: bytes
    tensors: tuple[tuple[Recipe, int], ...]
    """(tensor, its first byte in the file)"""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(recipe.nbytes for recipe, _ in self.tensors)

    def create(self, folder: Path) -> None:
        """Make the file in its full size with its header, unless it is there."""
        path = folder / self.file
        if path.is_file() and path.stat().st_size == self.nbytes:
            return
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.nbytes)


def plan_shard(file: str, metadata: Mapping[str, str] | None, tensors: Mapping[str, Tensor]) -> ShardPlan:
    """A file that holds `tensors` in the given order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    placed: list[tuple[Recipe, int]] = []
    for name, tensor in tensors.items():
        end = offset + tensor.recipe.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        placed.append((tensor.recipe, offset))
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return ShardPlan(file=file, header=whole, tensors=tuple((recipe, len(whole) + at) for recipe, at in placed))


def fill_jobs(shards: Iterable[ShardPlan], job_bytes: int, expected: Mapping[str, str]) -> list[SafetensorsJob]:
    """Jobs of about `job_bytes` that write the shards' tensors; checksums must be the `expected` ones."""
    jobs = []
    for shard in shards:
        for run in _runs(shard.tensors, job_bytes):
            known = {recipe.name: expected[recipe.name] for recipe, _ in run if recipe.name in expected}
            jobs.append(SafetensorsJob(file=shard.file, tensors=tuple(run), expected=known))
    return jobs


def _runs(tensors: Sequence[tuple[Recipe, int]], job_bytes: int) -> Iterable[list[tuple[Recipe, int]]]:
    run: list[tuple[Recipe, int]] = []
    size = 0
    for recipe, offset in tensors:
        if run and size + recipe.nbytes > job_bytes:
            yield run
            run, size = [], 0
        run.append((recipe, offset))
        size += recipe.nbytes
    if run:
        yield run

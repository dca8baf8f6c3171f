"""Compares two checkpoints, of either kind, tensor by tensor and bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_scalerl.convert.arrays import RAW
from megatron_scalerl.convert.jobs import CompareJob, Job, Record
from megatron_scalerl.convert.options import Options, Summary, progress
from megatron_scalerl.convert.pieces import Recipe
from megatron_scalerl.convert.views import View, open_view
from megatron_scalerl.convert.workers import run_jobs

_LISTED = 20

Pair = tuple[Recipe, Recipe]


def verify(first: str | Path, second: str | Path, options: Options | None = None) -> Summary:
    """Compare two folders. With `options.dtype` both are taken in that type.

    Raises ValueError that lists the tensors which are missing, have another type or shape, or differ in a bit.
    """
    options = options or Options()
    views = open_view(first), open_view(second)
    nbytes = compare(*views, options)
    return Summary(tensors=len(views[0].tensors), nbytes=nbytes, resumed_bytes=0, verified=True)


def compare(first: View, second: View, options: Options) -> int:
    """Like `verify`, for opened checkpoints; returns the number of bytes that were compared."""
    pairs = _pairs(first, second, options.dtype)
    total = sum(recipe.nbytes for recipe, _ in pairs)
    jobs = _jobs(pairs, options.bytes_of_a_job(total))
    different: list[str] = []

    def note(job: Job, record: Record) -> None:
        different.extend(record["different"])

    with progress(options, "comparing", total) as moved:
        run_jobs(
            jobs,
            [first.files, second.files],
            folder=first.path,
            processes=options.processes,
            allow_nonfinite=True,
            on_bytes=moved,
            on_done=note,
        )
    if different:
        raise ValueError(f"{second.path}: expected the bits of {first.path}, found others in {_listed(different)}")
    return total


def _pairs(first: View, second: View, dtype: str | None) -> list[Pair]:
    names = [name for name in first.tensors if name not in second.tensors]
    if names:
        raise ValueError(f"{second.path}: expected the tensors of {first.path}, found no {_listed(names)}")
    names = [name for name in second.tensors if name not in first.tensors]
    if names:
        raise ValueError(f"{second.path}: expected the tensors of {first.path}, found {_listed(names)} besides")
    return [_pair(first, second, name, dtype) for name in first.tensors]


def _pair(first: View, second: View, name: str, dtype: str | None) -> Pair:
    ours, theirs = first.tensors[name], second.tensors[name]
    if RAW in (ours.recipe.dtype, theirs.recipe.dtype):
        ours, theirs = first.raw.get(name, ours), second.raw.get(name, theirs)
        dtype = None
    kinds = [(dtype or t.dtype, list(t.shape)) for t in (ours, theirs)]
    if kinds[0] != kinds[1]:
        expected, found = (f"{kind} {shape}" for kind, shape in kinds)
        raise ValueError(f"{second.path}: {name}: expected {expected} as in {first.path}, found {found}")
    if dtype is None:
        return ours.recipe, theirs.recipe
    return replace(ours.recipe, dtype=dtype), replace(theirs.recipe, dtype=dtype)


def _jobs(pairs: Sequence[Pair], job_bytes: int) -> list[CompareJob]:
    jobs: list[CompareJob] = []
    group: list[Pair] = []
    for number, pair in enumerate(pairs):
        group.append(pair)
        last = number == len(pairs) - 1
        if last or sum(recipe.nbytes for recipe, _ in group) >= job_bytes:
            jobs.append(CompareJob(name=f"comparison {len(jobs)}", pairs=tuple(group)))
            group = []
    return jobs


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more

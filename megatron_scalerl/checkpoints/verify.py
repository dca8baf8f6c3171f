"""Compares two checkpoints, of either kind, tensor by tensor and bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_scalerl.checkpoints.assembly import RAW, Assembly
from megatron_scalerl.checkpoints.conversion import Options, Summary, progress
from megatron_scalerl.checkpoints.dist_reader import listed
from megatron_scalerl.checkpoints.jobs import CompareJob, Job, JobResult, Setting, grouped
from megatron_scalerl.checkpoints.views import View, open_view
from megatron_scalerl.checkpoints.workers import run_jobs

Pair = tuple[Assembly, Assembly]


def verify(first: str | Path, second: str | Path, options: Options | None = None) -> Summary:
    """Compare two folders. With `options.dtype` both are compared in that type.

    Raises ValueError listing the tensors that are missing, have another type or shape, or differ in a bit.
    """
    options = options or Options()
    views = open_view(first), open_view(second)
    nbytes = compare(*views, options)
    return Summary(tensors=len(views[0].tensors), nbytes=nbytes, resumed_bytes=0, verified=True)


def compare(first: View, second: View, options: Options) -> int:
    """Like `verify`, for opened checkpoints; returns the number of bytes that were compared."""
    pairs = _pairs(first, second, options.dtype)
    total = sum(assembly.nbytes for assembly, _ in pairs)
    groups = grouped(pairs, lambda pair: pair[0].nbytes, options.bytes_of_a_job(total))
    different: list[str] = []

    def note(job: Job, result: JobResult) -> None:
        different.extend(result["different"])

    with progress(options, "comparing", total) as advance:
        run_jobs(
            [CompareJob(name=f"comparison {number}", pairs=group) for number, group in enumerate(groups)],
            Setting(sources=[first.files, second.files], folder=first.path, allow_nonfinite=True),
            processes=options.processes,
            on_bytes=advance,
            on_done=note,
        )
    if different:
        raise ValueError(f"{second.path}: expected the bits of {first.path}, found others in {listed(different)}")
    return total


def _pairs(first: View, second: View, dtype: str | None) -> list[Pair]:
    names = [name for name in first.tensors if name not in second.tensors]
    if names:
        raise ValueError(f"{second.path}: expected the tensors of {first.path}, found no {listed(names)}")
    names = [name for name in second.tensors if name not in first.tensors]
    if names:
        raise ValueError(f"{second.path}: expected the tensors of {first.path}, found {listed(names)} besides")
    return [_pair(first, second, name, dtype) for name in first.tensors]


def _pair(first: View, second: View, name: str, dtype: str | None) -> Pair:
    ours, theirs = first.tensors[name], second.tensors[name]
    if RAW in (ours.assembly.dtype, theirs.assembly.dtype):
        ours, theirs = first.raw.get(name, ours), second.raw.get(name, theirs)
        dtype = None
    kinds = [(dtype or t.dtype, list(t.shape)) for t in (ours, theirs)]
    if kinds[0] != kinds[1]:
        expected, found = (f"{kind} {shape}" for kind, shape in kinds)
        raise ValueError(f"{second.path}: {name}: expected {expected} as in {first.path}, found {found}")
    if dtype is None:
        return ours.assembly, theirs.assembly
    return replace(ours.assembly, dtype=dtype), replace(theirs.assembly, dtype=dtype)

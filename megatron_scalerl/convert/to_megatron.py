"""A Hugging Face folder as a Megatron `torch_dist` checkpoint that opens under any parallel layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.commit import write_commit
from megatron_scalerl.convert import manifest as manifests
from megatron_scalerl.convert.dist_writer import finish_checkpoint
from megatron_scalerl.convert.hf_folder import HfFolder, open_folder
from megatron_scalerl.convert.jobs import Blob, CheckpointJob, Job, SourceFiles, Unit
from megatron_scalerl.convert.layout import extra_states, place_of
from megatron_scalerl.convert.manifest import Manifest
from megatron_scalerl.convert.options import Options, Summary, progress
from megatron_scalerl.convert.safetensors_plan import ShardPlan, fill_jobs, plan_shard
from megatron_scalerl.convert.side_files import SIDE_FOLDER, copy_side_files, policy_config, source_marks
from megatron_scalerl.convert.verify import compare
from megatron_scalerl.convert.views import CARRIED, folder_view, megatron_view, raw_tensor
from megatron_scalerl.convert.weight_map import (
    Names,
    checked_names,
    folder_recipe,
    only_dtype,
    parameter_recipe,
)
from megatron_scalerl.convert.work_folder import WorkFolder, work_folder
from megatron_scalerl.convert.workers import run_jobs
from megatron_scalerl.models import family as family_of
from megatron_scalerl.models.family import Family, Rule

CHUNK_BYTES = 128 << 20
"""Larger parameters are cut into chunks of whole rows: the stock load holds a chunk at a time."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    folder: HfFolder
    family: Family
    names: Names
    jobs: tuple[Job, ...]
    carried: tuple[ShardPlan, ...]
    nbytes: int


def to_megatron(hf_path: str | Path, out: str | Path, options: Options | None = None) -> Summary:
    """Convert a Hugging Face folder. Memory of a process is a few bands of a tensor, however large the model.

    Raises ValueError, and leaves nothing at `out`, for every mistake in the folder, a full disk, an `out` that
    exists, weights that are not finite, and a comparison that fails.
    """
    options = options or Options()
    hf_path = Path(hf_path)
    plan = _plan(hf_path, options)
    files = SourceFiles(hugging_face=plan.folder)
    with work_folder(out, _fingerprint(plan, options), nbytes=plan.nbytes, done_bytes=_done(plan.jobs)) as work:
        resumed = _done(plan.jobs)(work.records)
        for shard in plan.carried:
            shard.create(work.path)
        with progress(options, "to Megatron", plan.nbytes, resumed) as moved:
            run_jobs(
                work.left(plan.jobs),
                [files],
                folder=work.path,
                processes=options.processes,
                allow_nonfinite=options.allow_nonfinite,
                on_bytes=moved,
                on_done=work.keep,
            )
        _finish(work, plan, options)
        if options.verify:
            compare(folder_view(plan.folder), megatron_view(work.path), options)
        work.publish()
    return Summary(
        tensors=len(plan.folder.tensors), nbytes=plan.nbytes, resumed_bytes=resumed, verified=options.verify
    )


def _plan(hf_path: Path, options: Options) -> _Plan:
    config = policy_config(hf_path)
    folder = open_folder(hf_path)
    family = family_of(config, folder.tensors)
    names = checked_names(folder, family)
    units = list(_units(folder, family, names, options.dtype))
    carried = _carried(folder, names)
    total = sum(unit.nbytes for unit in units) + sum(recipe.nbytes for s in carried for recipe, _ in s.tensors)
    job_bytes = options.bytes_of_a_job(total)
    jobs: list[Job] = [
        CheckpointJob(file=f"__0_{number}.distcp", units=tuple(group))
        for number, group in enumerate(_grouped(units, job_bytes))
    ]
    jobs += fill_jobs(carried, job_bytes, {})
    return _Plan(folder=folder, family=family, names=names, jobs=tuple(jobs), carried=carried, nbytes=total)


def _units(folder: HfFolder, family: Family, names: Names, dtype: str | None) -> Iterable[Unit]:
    rules: dict[tuple[str, ...], list[Rule]] = {}
    for rule in family.rules:
        if rule.exported:
            rules.setdefault(tuple(rule.hf_shapes), []).append(rule)
    owned = [name for group in rules for name in group]
    assert len(owned) == len(set(owned)), "a Hugging Face tensor in two groups of rules"
    for group, members in rules.items():
        copies = [(folder_recipe(folder, copy, dtype), of) for copy, of in names.copies.items() if of in group]
        yield Unit(
            tensors=tuple(folder_recipe(folder, name, dtype) for name in group),
            blobs=tuple(blob for rule in members for blob in _blobs(rule, folder, family, dtype)),
            copies=tuple(copies),
        )


def _blobs(rule: Rule, folder: HfFolder, family: Family, dtype: str | None) -> Iterable[Blob]:
    kinds = {folder.tensors[name].dtype for name in rule.hf_shapes}
    source = only_dtype(kinds, f"{folder.path}: {', '.join(rule.hf_shapes)}")
    recipe = parameter_recipe(rule, source, dtype or source)
    address = place_of(rule, family).written
    rows = max(1, CHUNK_BYTES // recipe.row_bytes)
    for start in range(0, recipe.shape[0], rows):
        yield Blob(recipe=recipe, address=address, start=start, stop=min(start + rows, recipe.shape[0]))


def _carried(folder: HfFolder, names: Names) -> tuple[ShardPlan, ...]:
    if not names.carried:
        return ()
    tensors = {name: raw_tensor(folder, name) for name in names.carried}
    return (plan_shard(f"{SIDE_FOLDER}/{CARRIED}", {"format": "pt"}, tensors),)


def _grouped(units: Sequence[Unit], job_bytes: int) -> Iterable[list[Unit]]:
    group: list[Unit] = []
    size = 0
    for unit in units:
        if group and size + unit.nbytes > job_bytes:
            yield group
            group, size = [], 0
        group.append(unit)
        size += unit.nbytes
    if group:
        yield group


def _done(jobs: Sequence[Job]) -> Any:
    return lambda records: sum(job.nbytes for job in jobs if job.name in records)


def _fingerprint(plan: _Plan, options: Options) -> dict[str, Any]:
    """Equal where an earlier conversion's files can be kept."""
    return dict(
        direction="to-megatron",
        dtype=options.dtype,
        allow_nonfinite=options.allow_nonfinite,
        source=source_marks(plan.folder.path, ["config.json", *(shard.file for shard in plan.folder.shards)]),
        jobs=[(job.name, job.nbytes) for job in plan.jobs],
    )


def _finish(work: WorkFolder, plan: _Plan, options: Options) -> None:
    records = [work.records[job.name] for job in plan.jobs]
    checkpoint = [r for job, r in zip(plan.jobs, records) if isinstance(job, CheckpointJob)]
    finish_checkpoint(work.path, checkpoint, extra_states(plan.family))
    copy_side_files(plan.folder.path, work.path / SIDE_FOLDER)
    write_durably(work.path / manifests.FILE, manifests.to_bytes(_manifest(plan, options, records)))
    write_commit(work.path, {"converted_from": plan.folder.path.name, "family": plan.family.name})


def _manifest(plan: _Plan, options: Options, records: Sequence[Any]) -> Manifest:
    found = manifests.checksums(records)
    tensors = {}
    for name, stored in plan.folder.tensors.items():
        kept = name in plan.names.carried
        dtype = stored.dtype if kept else options.dtype or stored.dtype
        tensors[name] = dict(dtype=dtype, shape=list(stored.shape), checksum=found[name])
    return Manifest(
        tensors=tensors,
        shards=plan.folder.shards,
        index_metadata=plan.folder.index_metadata,
        copies=plan.names.copies,
        carried=plan.names.carried,
    )

"""A Megatron `torch_dist` checkpoint as a Hugging Face folder, in the files that it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.hf_folder import add_generation_keys
from megatron_scalerl.convert import manifest as manifests
from megatron_scalerl.convert.arrays import TORCH_NAMES
from megatron_scalerl.convert.hf_folder import INDEX, open_folder
from megatron_scalerl.convert.jobs import SafetensorsJob
from megatron_scalerl.convert.manifest import Manifest
from megatron_scalerl.convert.options import Options, Summary, progress
from megatron_scalerl.convert.safetensors_plan import ShardPlan, fill_jobs, plan_shard
from megatron_scalerl.convert.side_files import copy_side_files, set_config_dtype, source_marks
from megatron_scalerl.convert.verify import compare
from megatron_scalerl.convert.views import MegatronView, folder_view, megatron_view
from megatron_scalerl.convert.work_folder import WorkFolder, work_folder
from megatron_scalerl.convert.workers import run_jobs


def to_hf(
    megatron_path: str | Path, out: str | Path, options: Options | None = None, *, like: str | Path | None = None
) -> Summary:
    """Convert a checkpoint that `to_megatron` wrote, or with `like` any other, a run's for example.

    Tensors outside the policy, the tokenizer, and the spread over files come from the checkpoint itself, or from
    the Hugging Face folder `like`. Whatever layout the checkpoint was saved under, nothing is loaded as a whole.
    Raises ValueError, and leaves nothing at `out`, for a checkpoint that is not whole or does not fit its config,
    checksums that differ from the manifest's, a full disk, an `out` that exists, weights that are not finite.
    """
    options = options or Options()
    view = megatron_view(megatron_path, like=like, dtype=options.dtype)
    shards = [_shard(shard.file, shard.metadata, shard.tensors, view) for shard in view.shards]
    total = sum(shard.nbytes for shard in shards)
    jobs = fill_jobs(shards, options.bytes_of_a_job(total), view.checksums)

    def done(records: dict[str, Any]) -> int:
        return sum(job.nbytes for job in jobs if job.name in records)

    plan = _fingerprint(view, options, jobs)
    with work_folder(out, plan, nbytes=total, done_bytes=done) as work:
        resumed = done(work.records)
        for shard in shards:
            shard.create(work.path)
        with progress(options, "to Hugging Face", total, resumed) as moved:
            run_jobs(
                work.left(jobs),
                [view.files],
                folder=work.path,
                processes=options.processes,
                allow_nonfinite=options.allow_nonfinite,
                on_bytes=moved,
                on_done=work.keep,
            )
        _finish(work, view, shards, manifests.checksums(work.records[job.name] for job in jobs))
        if options.verify:
            compare(view, folder_view(open_folder(work.path)), options)
        work.publish()
    nbytes = sum(job.nbytes for job in jobs)
    return Summary(tensors=len(view.tensors), nbytes=nbytes, resumed_bytes=resumed, verified=options.verify)


def _shard(file: str, metadata: Any, names: tuple[str, ...], view: MegatronView) -> ShardPlan:
    return plan_shard(file, metadata, {name: view.tensors[name] for name in names})


def _fingerprint(view: MegatronView, options: Options, jobs: list[SafetensorsJob]) -> dict[str, Any]:
    assert view.files.held is not None
    files = sorted({chunk.file for held in view.files.held.values() for chunk in held.chunks})
    return dict(
        direction="to-hf",
        dtype=options.dtype,
        allow_nonfinite=options.allow_nonfinite,
        source=source_marks(view.path, [".metadata", *files]),
        side=source_marks(view.side, ["config.json"]),
        jobs=[(job.name, job.nbytes) for job in jobs],
    )


def _finish(work: WorkFolder, view: MegatronView, shards: list[ShardPlan], checksums: dict[str, str]) -> None:
    kinds = {view.tensors[name].dtype for name in view.tensors if name not in view.carried}
    copy_side_files(view.side, work.path)
    add_generation_keys(work.path, view.generation)
    if len(kinds) == 1:
        set_config_dtype(work.path, TORCH_NAMES[kinds.pop()])
    if view.index_metadata is not None:
        sizes = [recipe.nbytes for shard in shards for recipe, _ in shard.tensors]
        index = {
            "metadata": {**view.index_metadata, "total_size": sum(sizes)},
            "weight_map": {recipe.name: shard.file for shard in shards for recipe, _ in shard.tensors},
        }
        write_durably(work.path / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    manifest = Manifest(
        tensors={
            name: dict(dtype=tensor.dtype, shape=list(tensor.shape), checksum=checksums[name])
            for name, tensor in view.tensors.items()
        },
        shards=view.shards,
        index_metadata=view.index_metadata,
        copies=view.copies,
        carried=view.carried,
    )
    write_durably(work.path / manifests.FILE, manifests.to_bytes(manifest))

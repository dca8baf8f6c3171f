"""A Megatron `torch_dist` checkpoint as a Hugging Face folder, in the files that it came from."""

from __future__ import annotations

from pathlib import Path

from megatron_scalerl.checkpoints.assembly import TORCH_NAMES
from megatron_scalerl.checkpoints.conversion import Options, Summary, convert
from megatron_scalerl.checkpoints.hf_folder import open_folder
from megatron_scalerl.checkpoints.hf_writer import (
    SafetensorsFile,
    add_generation_keys,
    copy_side_files,
    fill_jobs,
    plan_file,
    set_config_dtype,
    write_index,
)
from megatron_scalerl.checkpoints.jobs import JobResult
from megatron_scalerl.checkpoints.verify import compare
from megatron_scalerl.checkpoints.views import (
    MegatronView,
    folder_view,
    megatron_view,
    source_state,
    with_checksums,
    write_record,
)


def to_hf(
    megatron_path: str | Path, out: str | Path, options: Options | None = None, *, like: str | Path | None = None
) -> Summary:
    """Convert a checkpoint that `to_megatron` wrote, or with `like` any other, for example of a run.

    Tensors outside the policy, the tokenizer, and the distribution over files come from the checkpoint itself, or
    from the Hugging Face folder `like`. Whatever layout the checkpoint was saved under, nothing is loaded as a whole.
    Raises ValueError, and leaves nothing at `out`, for a checkpoint that is incomplete or does not fit its config,
    checksums that differ from the recorded ones, a full disk, an existing `out`, and weights that are not finite.
    """
    options = options or Options()
    view = megatron_view(megatron_path, like=like, dtype=options.dtype)
    files = [
        plan_file(shard.file, shard.metadata, {name: view.tensors[name] for name in shard.tensors})
        for shard in view.layout.shards
    ]
    jobs = fill_jobs(files, options.bytes_of_a_job(sum(file.nbytes for file in files)), view.checksums)

    def finish(work: Path, results: dict[str, JobResult]) -> None:
        _write_the_rest(work, view, files)
        write_record(work, with_checksums(view.layout, view.tensors, results.values()))
        if options.verify:
            compare(view, folder_view(open_folder(work)), options)

    assert view.files.parameters is not None
    read = sorted({chunk.file for stored in view.files.parameters.values() for chunk in stored.chunks})
    resumed = convert(
        out,
        jobs,
        view.files,
        options,
        direction="to-hf",
        inputs=dict(
            source=source_state(view.path, [".metadata", *read]), side=source_state(view.side, ["config.json"])
        ),
        files=files,
        finish=finish,
    )
    nbytes = sum(job.nbytes for job in jobs)
    return Summary(tensors=len(view.tensors), nbytes=nbytes, resumed_bytes=resumed, verified=options.verify)


def _write_the_rest(work: Path, view: MegatronView, files: list[SafetensorsFile]) -> None:
    """Config, tokenizer, generation config, and the index if the folder has one."""
    copy_side_files(view.side, work)
    add_generation_keys(work, view.generation)
    kinds = {tensor.dtype for name, tensor in view.tensors.items() if name not in view.layout.passthrough}
    if len(kinds) == 1:
        set_config_dtype(work, TORCH_NAMES[kinds.pop()])
    if view.layout.index_metadata is not None:
        write_index(work, view.layout.index_metadata, files)

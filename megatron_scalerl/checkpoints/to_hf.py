"""Converts a Megatron `torch_dist` checkpoint to a Hugging Face folder, with config and tokenizer of the original."""

from pathlib import Path

from megatron_scalerl.checkpoints.assembly import TORCH_NAMES
from megatron_scalerl.checkpoints.conversion import DEFAULTS, Copier, Options, Summary, progress, result_folder
from megatron_scalerl.checkpoints.hf_folder import open_folder
from megatron_scalerl.checkpoints.hf_writer import (
    add_generation_keys,
    copy_side_files,
    set_config_dtype,
    write_index,
    write_shard,
)
from megatron_scalerl.checkpoints.verify import compare
from megatron_scalerl.checkpoints.views import View, folder_view, megatron_view, write_record


def to_hf(megatron_path: Path, out: Path, options: Options = DEFAULTS, *, like: Path | None = None) -> Summary:
    """Convert a Megatron checkpoint: one that `to_megatron` wrote or, with `like`, any checkpoint, such as a run's.

    The tokenizer, tensors outside the policy, and the division of tensors into files come from the Hugging Face
    folder `like`, without `like` from the checkpoint. Tensors are read in blocks of rows, whatever the parallel
    layout of the save.

    Raises ValueError, and leaves nothing at `out`, for a checkpoint that is incomplete or does not fit the config,
    checksums that differ from the record, a full disk, an existing `out`, and weights that are not finite.
    """
    return write_view(megatron_view(megatron_path, like=like, dtype=options.dtype), out, options)


def write_view(view: View, out: Path, options: Options) -> Summary:
    """Write a view as a Hugging Face folder. Raises ValueError as `to_hf` does."""
    layout = view.layout
    nbytes = sum(view.tensors[name].nbytes for shard in layout.shards for name in shard.tensors)
    checksums: dict[str, str] = {}
    with result_folder(out, nbytes) as work:
        with progress(options, "to-hf", nbytes) as advance:
            copier = Copier(sources=view.sources, options=options, on_bytes=advance)
            for shard in layout.shards:
                checksums |= write_shard(work, shard, view.tensors, copier, layout.passthrough)
                # Checksums are compared after each file, so a damaged checkpoint is reported before the next files
                # are written.
                _compare_checksums(view, shard.tensors, checksums)
        _write_the_rest(work, view)
        write_record(work, layout, view.tensors, checksums)
        if options.verify:
            compare(view, folder_view(open_folder(work)), options)
    return Summary(tensors=len(view.tensors), nbytes=nbytes, verified=options.verify)


def _compare_checksums(view: View, names: tuple[str, ...], checksums: dict[str, str]) -> None:
    """Raise ValueError if a tensor's checksum differs from conversion.json's.

    A tensor is not compared if the type to write differs from the type in conversion.json.
    """
    for name in names:
        entry = view.layout.tensors.get(name)
        if entry is None or entry.dtype != view.tensors[name].dtype or entry.checksum == checksums[name]:
            continue
        raise ValueError(f"{name}: the checksum is {checksums[name]}, but {entry.checksum} was recorded")


def _write_the_rest(work: Path, view: View) -> None:
    """Write config, tokenizer and generation config, and an index if the original folder had an index."""
    copy_side_files(view.side, work)
    add_generation_keys(work, view.generation)
    outside = {*view.layout.passthrough, *view.frozen}
    kinds = {tensor.dtype for name, tensor in view.tensors.items() if name not in outside}
    if len(kinds) == 1:
        set_config_dtype(work, TORCH_NAMES[kinds.pop()])
    if view.layout.index_metadata is not None:
        write_index(work, view.layout.index_metadata, view.layout.shards, view.tensors)

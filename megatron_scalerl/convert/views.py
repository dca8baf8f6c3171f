"""A checkpoint of either kind, seen as Hugging Face tensors in files: what is exported and what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_scalerl.convert import manifest as manifests
from megatron_scalerl.convert.arrays import BITS
from megatron_scalerl.convert.dist_reader import Held, held_parameters
from megatron_scalerl.convert.hf_folder import HfFolder, Shard, open_folder, read_header
from megatron_scalerl.convert.jobs import SourceFiles
from megatron_scalerl.convert.manifest import Manifest
from megatron_scalerl.convert.safetensors_plan import Tensor
from megatron_scalerl.convert.side_files import SIDE_FOLDER, policy_config
from megatron_scalerl.convert.weight_map import (
    bytes_recipe,
    checked_names,
    folder_recipe,
    parameter_shape,
    tensor_recipes,
)
from megatron_scalerl.models import family as family_of
from megatron_scalerl.models.family import Family
from megatron_scalerl.safe_load.files import refuse_links
from megatron_scalerl.safe_load.index import FORMAT_FILE

CARRIED = "carried.safetensors"
"""Tensors outside the policy, in a Megatron checkpoint's side folder."""


@dataclass(frozen=True, kw_only=True)
class View:
    """All tensors of a checkpoint in Hugging Face's coordinates."""

    path: Path
    files: SourceFiles
    tensors: Mapping[str, Tensor]
    raw: Mapping[str, Tensor]
    """Tensors that can be read as plain bytes, for comparing what only one side knows the type of."""


@dataclass(frozen=True, kw_only=True)
class MegatronView(View):
    """A Megatron checkpoint, and what its Hugging Face folder looks like."""

    side: Path
    """Folder with the config, the tokenizer and so on."""
    shards: tuple[Shard, ...]
    index_metadata: Mapping[str, Any] | None
    copies: Mapping[str, str]
    carried: tuple[str, ...]
    checksums: Mapping[str, str]
    """What the manifest says of tensors that are exported in the type they are held in."""
    generation: Mapping[str, Any]
    """Keys that generation_config.json must have."""


def open_view(path: str | Path) -> View:
    """Either kind of checkpoint. Raises ValueError for what is neither."""
    path = Path(path)
    if (path / FORMAT_FILE).is_file():
        return megatron_view(path)
    return folder_view(open_folder(path))


def folder_view(folder: HfFolder) -> View:
    """A Hugging Face folder."""
    tensors = {}
    for name, stored in folder.tensors.items():
        known = stored.dtype in BITS and stored.shape
        recipe = folder_recipe(folder, name) if known else bytes_recipe(folder, name)
        tensors[name] = Tensor(dtype=stored.dtype, shape=stored.shape, recipe=recipe)
    raw = {name: raw_tensor(folder, name) for name in folder.tensors}
    return View(path=folder.path, files=SourceFiles(hugging_face=folder), tensors=tensors, raw=raw)


def raw_tensor(folder: HfFolder, name: str) -> Tensor:
    """A tensor of a folder as its bytes."""
    stored = folder.tensors[name]
    return Tensor(dtype=stored.dtype, shape=stored.shape, recipe=bytes_recipe(folder, name))


def megatron_view(path: str | Path, *, like: str | Path | None = None, dtype: str | None = None) -> MegatronView:
    """A Megatron checkpoint of ours, or any with `like`, a Hugging Face folder that tells what it lacks.

    Raises ValueError where the checkpoint is not whole, does not fit the config, or has neither config nor `like`.
    """
    path = Path(path)
    if like is None:
        side, layout = path / SIDE_FOLDER, _own_manifest(path)
        refuse_links(side)
        outer = _carried_folder(side, layout)
        family = family_of(policy_config(side), layout.tensors)
    else:
        side = Path(like)
        config, outer = policy_config(side), open_folder(side)
        family = family_of(config, outer.tensors)
        layout = _layout_of(outer, family)
    held = _held(path, family)
    recipes = tensor_recipes(family, held, dtype, str(path))
    tensors = {name: Tensor(dtype=r.dtype, shape=r.shape, recipe=r) for name, r in recipes.items()}
    for copy, of in layout.copies.items():
        if of not in tensors:
            raise ValueError(f"{path}: {copy}: expected a copy of one of the checkpoint's tensors, found {of!r}")
        tensors[copy] = replace(tensors[of], recipe=replace(recipes[of], name=copy))
    raw = {}
    for name in layout.carried:
        assert outer is not None
        raw[name] = raw_tensor(outer, name)
    unknown = [name for shard in layout.shards for name in shard.tensors if name not in tensors and name not in raw]
    if unknown:
        raise ValueError(f"{path}: expected tensors of the checkpoint in its files, found {unknown[0]!r}")
    return MegatronView(
        path=path,
        files=SourceFiles(hugging_face=outer, megatron=path, held=held),
        tensors={**tensors, **raw},
        raw=raw,
        side=side,
        generation=family.generation_config,
        shards=layout.shards,
        index_metadata=layout.index_metadata,
        copies=layout.copies,
        carried=layout.carried,
        checksums=_known_checksums(layout, {**tensors, **raw}),
    )


def _held(path: Path, family: Family) -> dict[str, Held]:
    shapes = {rule.megatron: parameter_shape(rule) for rule in family.rules if rule.exported}
    return held_parameters(path, family, shapes)


def _own_manifest(path: Path) -> Manifest:
    own = manifests.read(path)
    if own is None:
        raise ValueError(
            f"{path}: expected {manifests.FILE}, found none; name the Hugging Face folder that it came from (--like)"
        )
    return own


def _carried_folder(side: Path, own: Manifest) -> HfFolder | None:
    if not own.carried:
        return None
    file = side / CARRIED
    if not file.is_file():
        raise ValueError(f"{file}: expected the tensors that are carried along, found no file")
    metadata, found = read_header(file)
    shard = Shard(file=CARRIED, metadata=metadata, tensors=tuple(stored.name for stored in found))
    tensors = {stored.name: stored for stored in found}
    lacking = [name for name in own.carried if name not in tensors]
    if lacking:
        raise ValueError(f"{file}: expected tensor {lacking[0]}, found none of that name")
    return HfFolder(path=side, tensors=tensors, shards=(shard,), index_metadata=None)


def _layout_of(folder: HfFolder, family: Family) -> Manifest:
    """The layout of another folder: a trained policy goes back into the files that it came from."""
    names = checked_names(folder, family)
    return Manifest(
        tensors={},
        shards=folder.shards,
        index_metadata=folder.index_metadata,
        copies=names.copies,
        carried=names.carried,
    )


def _known_checksums(layout: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: entry["checksum"]
        for name, entry in layout.tensors.items()
        if name in tensors and entry["dtype"] == tensors[name].dtype
    }

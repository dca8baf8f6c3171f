"""The index equals torch's own reading of .metadata, written by this or an older torch; its names exist in torch."""

import enum
import io
import pickle
import shutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hostile import saved
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_scalerl.checkpoints.plain_files import PlainFile
from megatron_scalerl.checkpoints.safe_index import _MODULES, _NAMES, check_checkpoint, read_index
from megatron_scalerl.checkpoints.safe_values import read_tensor

STATE = {
    "layer": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(4, dtype=torch.bfloat16)},
    "step": torch.tensor(7),
    "lr": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of torch.distributed.checkpoint, with Megatron's two files."""
    path = tmp_path_factory.mktemp("dcp") / "checkpoint"
    save(STATE, storage_writer=FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (path / "common.pt").write_bytes(saved({"iteration": 3}))
    return path


def test_the_index_equals_torchs_reading(folder):
    theirs = pickle.loads((folder / ".metadata").read_bytes())
    ours = read_index(folder)
    entries = theirs.state_dict_metadata
    assert {*ours.tensors, *ours.objects} == set(entries) == {"layer.weight", "layer.bias", "step", "lr"}
    assert set(ours.objects) == {key for key, e in entries.items() if isinstance(e, BytesStorageMetadata)} == {"lr"}
    places = {(i.fqn, i.offset): s for i, s in theirs.storage_data.items()}
    for key, tensor in ours.tensors.items():
        assert tensor.shape == tuple(entries[key].size)
        assert f"torch.{tensor.dtype}" == str(entries[key].properties.dtype)
        assert [(c.offset, c.shape) for c in tensor.chunks] == [(c.offsets, c.sizes) for c in entries[key].chunks]
        for chunk in tensor.chunks:
            info = places[key, torch.Size(chunk.offset)]
            assert (chunk.file, chunk.start, chunk.length) == (info.relative_path, info.offset, info.length)


class ByName(pickle.Pickler):
    """Pickles enumerations as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def rewritten(folder, target, value):
    """A copy of the checkpoint with `value` as its metadata."""
    shutil.copytree(folder, target)
    with (target / ".metadata").open("wb") as file:
        ByName(file).dump(value)
    return target


def test_enumerations_of_an_older_python(folder, tmp_path):
    theirs = pickle.loads((folder / ".metadata").read_bytes())
    written = rewritten(folder, tmp_path / "older", theirs)
    assert b"getattr" in (written / ".metadata").read_bytes()
    assert read_index(written) == replace(read_index(folder), path=written)


class Attribute:
    """Pickled as getattr(*arguments)."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


@pytest.mark.parametrize(
    "arguments", [(Metadata, "__init__"), (MetadataIndex, "fqn"), ({}, "get"), ("text", "upper")]
)
def test_no_other_attribute_is_taken(folder, tmp_path, arguments):
    hostile = rewritten(folder, tmp_path / "hostile", Attribute(*arguments))
    with pytest.raises(ValueError, match="something else than a member of an enumeration"):
        read_index(hostile)


def test_its_tensors_are_read(folder):
    ours = read_index(folder)
    for key, expected in {"layer.weight": STATE["layer"]["weight"], "step": STATE["step"]}.items():
        [chunk] = ours.tensors[key].chunks
        with PlainFile(folder, chunk.file) as file:
            assert torch.equal(read_tensor(file, chunk.start, chunk.length, key), expected)


def test_every_name_exists_in_torch_or_megatron():
    """Fails if upstream moves a name; pathlib._local exists from Python 3.13 on."""
    for module in _MODULES - {"pathlib._local"}:
        assert import_module(module)
    for module, name in _NAMES:
        assert hasattr(import_module(module), name), f"{module}.{name}"


class _Renames(pickle._Pickler):
    """Writes classes under the names that they had in torch before 2.3."""

    def save_global(self, obj, name=None):
        old = {"TensorProperties": "TensorProperties", "_MEM_FORMAT_ENCODING": "MEM_FORMAT_ENCODING"}
        if getattr(obj, "__name__", "") in old and "checkpoint" in obj.__module__:
            line = f"torch.distributed._shard.sharded_tensor.metadata\n{old[obj.__name__]}\n"
            self.write(pickle.GLOBAL + line.encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


_Renames.dispatch = {**pickle._Pickler.dispatch, type: _Renames.save_global}


def test_an_index_of_an_older_torch_is_read(folder, tmp_path):
    stream = io.BytesIO()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    _Renames(stream).dump(metadata)
    assert b"sharded_tensor.metadata\nTensorProperties" in stream.getvalue()
    (tmp_path / ".metadata").write_bytes(stream.getvalue())
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert read_index(tmp_path).tensors == read_index(folder).tensors


def write(path, metadata):
    """A folder with nothing but an index."""
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m: [m], "list stands in place of Metadata"),
        (lambda m: m.storage_data, "dict stands in place of Metadata"),
        (lambda m: Metadata(state_dict_metadata=3), "Metadata.state_dict_metadata is of type int"),
        (lambda m: m.state_dict_metadata.update({7: BytesStorageMetadata()}), "the key '7' is not one line of text"),
        (lambda m: m.state_dict_metadata.update(a=BytesStorageMetadata()), "a at None has no byte range"),
        (lambda m: m.state_dict_metadata.update(a=7), "int stands in place of TensorStorageMetadata"),
        (lambda m: setattr(entry(m), "size", torch.Size([3])), "is outside layer.weight of shape"),
        (lambda m: setattr(entry(m), "size", (3, "4")), "a shape is not a tuple of sizes"),
        (lambda m: setattr(entry(m), "properties", None), "layer.weight has no type"),
        (lambda m: setattr(entry(m).chunks[0], "offsets", torch.Size([9, 9])), "at [9, 9] is outside layer.weight"),
        (lambda m: setattr(entry(m).chunks[0], "sizes", None), "a shape is not a tuple of sizes"),
        (lambda m: entry(m).chunks.append(3), "int stands in place of ChunkStorageMetadata"),
        (lambda m: setattr(m, "storage_data", {1: 2}), "int stands in place of MetadataIndex"),
        (lambda m: m.storage_data.clear(), "has no byte range"),
        (lambda m: offset(m, (1, [])), "an offset is not a tuple of sizes"),
        (lambda m: offset(m, (nested(12),)), "an offset is not a tuple of sizes"),
        (lambda m: entry(m).chunks.append(entry(m).chunks[0]), "layer.weight at (0, 0) has no byte range"),
    ],
)
def test_an_inconsistent_index_is_refused(change, found, folder, tmp_path):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert metadata.version == CURRENT_DCP_VERSION
    changed = change(metadata)
    write(tmp_path, metadata if changed is None else changed)
    with pytest.raises(ValueError) as refused:
        read_index(tmp_path)
    said = str(refused.value)
    assert said.startswith(f"{tmp_path}/.metadata: it is not the metadata of a checkpoint: ") and found in said


def offset(metadata, value):
    """Sets another offset for the byte range of an item."""
    object.__setattr__(next(iter(metadata.storage_data)), "offset", value)


def nested(times):
    """A pair of pairs of pairs: a hash that takes 2**times steps, in few bytes."""
    value = ()
    for _ in range(times):
        value = (value, value)
    return value


def entry(metadata):
    """The description of a tensor."""
    return metadata.state_dict_metadata["layer.weight"]


@pytest.mark.parametrize("at", range(0, 2000, 97))
def test_a_damaged_index_is_one_error(at, folder, tmp_path):
    content = bytearray((folder / ".metadata").read_bytes())
    content[at % len(content)] ^= 0xFF
    (tmp_path / ".metadata").write_bytes(content)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    try:
        read_index(tmp_path)
    except ValueError as error:
        assert "\n" not in str(error)


def test_objects_in_the_same_bytes_are_refused(folder, tmp_path):
    """Otherwise a folder could have one range decoded any number of times."""
    shutil.copytree(folder, tmp_path / "copy")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    [info] = [s for i, s in metadata.storage_data.items() if i.fqn == "lr"]
    for n in range(3):
        metadata.state_dict_metadata[f"again{n}"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(f"again{n}")] = info
    (tmp_path / "copy" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"distcp: two parts overlap at byte"):
        check_checkpoint(tmp_path / "copy")

"""The index equals torch's own reading of .metadata; hostile pickles have no effect."""

import enum
import functools
import operator
import pickle
import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hostile import Evil
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_scalerl.checkpoints.safe_index import _MODULES, _NAMES, Record, read_index

STATE = {
    "layer": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(4, dtype=torch.bfloat16)},
    "step": torch.tensor(7),
    "lr": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of torch.distributed.checkpoint, with Megatron's metadata.json."""
    path = tmp_path_factory.mktemp("dcp") / "checkpoint"
    save(STATE, storage_writer=FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
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
            place = chunk.place
            assert (place.file, place.start, place.length) == (info.relative_path, info.offset, info.length)


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


def test_every_name_exists_in_torch_or_megatron():
    """Fails if upstream moves a name; pathlib._local exists from Python 3.13 on."""
    for module in _MODULES - {"pathlib._local"}:
        assert import_module(module)
    for module, name in _NAMES:
        assert hasattr(import_module(module), name), f"{module}.{name}"


@pytest.fixture
def refused(tmp_path):
    """Why the folder with this pickle as its index is refused."""

    def run(data):
        (tmp_path / ".metadata").write_bytes(data)
        (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        with pytest.raises(ValueError) as refused:
            read_index(tmp_path)
        said = str(refused.value)
        start = f"{tmp_path}/.metadata: this file is not valid checkpoint metadata: "
        assert said.startswith(start) and said.isprintable()
        return said.removeprefix(start)

    return run


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda m: [m], "Expected `object`, got `array`"),
        (lambda m: Metadata(state_dict_metadata=3), "Expected `object`, got `int` - at `$.state_dict_metadata`"),
        (lambda m: m.state_dict_metadata.update({7: BytesStorageMetadata()}), "at `key` in `$.state_dict_metadata`"),
        (lambda m: m.state_dict_metadata.update({"\33[": BytesStorageMetadata()}), "at `key` in `$.state_dict"),
        (lambda m: m.state_dict_metadata.update(a=BytesStorageMetadata()), "no byte range is listed for a "),
        (lambda m: setattr(entry(m), "size", torch.Size([3])), "exceeds layer.weight of shape"),
        (lambda m: setattr(entry(m), "size", (3, "4")), "Expected `int`, got `str` - at `$.state_dict_metadata"),
        (lambda m: setattr(entry(m), "properties", "float32"), "got `str` - at `$.state_dict_metadata[...].prop"),
        (lambda m: setattr(entry(m).chunks[0], "offsets", torch.Size([9, 9])), "at offset (9, 9) exceeds layer."),
        (lambda m: setattr(entry(m).chunks[0], "sizes", None), "Expected `array`, got `null` - at `$.state_dict"),
        (lambda m: setattr(entry(m), "size", torch.Size([4, 4])), "layer.weight have 12 elements, but"),
        (lambda m: setattr(m, "storage_data", {1: 2}), "got `int` - at `key` in `$.storage_data`"),
        (lambda m: object.__setattr__(next(iter(m.storage_data)), "offset", (1, [])), "got `array` - at `key.offset"),
        (lambda m: entry(m).chunks.append(entry(m).chunks[0]), "(offset of the chunk: (0, 0))"),
    ],
)
def test_an_inconsistent_index_is_refused(change, found, folder, refused):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    changed = change(metadata)
    assert found in refused(pickle.dumps(metadata if changed is None else changed))


def entry(metadata):
    """The description of a tensor."""
    return metadata.state_dict_metadata["layer.weight"]


@pytest.mark.parametrize(
    "value, name",
    [
        (Evil("made_by_a_pickle"), "posix.mkdir"),
        (functools.partial(print), "functools.partial"),
        (operator.attrgetter("a"), "operator.attrgetter"),
        (eval, "eval"),
        (sys.exit, "sys.exit"),
        (torch.load, "torch.serialization.load"),
    ],
    ids=["reduce", "partial", "operator", "eval", "exit", "torch"],
)
@pytest.mark.parametrize("protocol", [0, 4])
def test_other_names_are_refused_by_name(value, name, protocol, refused):
    assert refused(pickle.dumps(value, protocol)).endswith(f"{name} is not allowed")
    assert not Path("made_by_a_pickle").exists()


@pytest.mark.parametrize("data", [b"(iposix\nmkdir\n.", b"(cposix\nmkdir\nX\x01\0\0\0ao.", b"cposix\nmkdir\n)\x81."])
def test_every_opcode_that_names_something_is_asked(data, refused):
    assert refused(data) == "the pickled name posix.mkdir is not allowed"
    assert refused(data.replace(b"posix", b"os\33[2J")) == "the pickled name os\\x1b[2J.mkdir is not allowed"


NOTE = b"}X\x07\0\0\0__doc__X\x04\0\0\0evils"
"""{"__doc__": "evil"}"""
CLASSES = [("pathlib", "Path.exists.__globals__"), (Metadata.__module__, "Metadata")]


@pytest.mark.parametrize("name", [*_NAMES, ("torch", "float32"), *CLASSES], ids=".".join)
@pytest.mark.parametrize("state", [NOTE + b"b.", b"N" + NOTE + b"\x86b.", b"X\x01\0\0\0aK\x01s.", b"K\x01a."])
def test_nothing_that_is_allowed_can_be_changed_nor_is_upstreams(name, state, refused):
    """Python's unpickler sets attributes of classes, too: of Metadata, if it were in the list."""
    before = Metadata.__doc__, Record.__doc__
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in name)
    refused(b"\x80\x04" + texts + b"\x93" + state)
    assert before == (Metadata.__doc__, Record.__doc__)


@pytest.mark.parametrize(
    "data",
    [b"", b"h\x07.", b"\x80\xff.", b"cno newline", b"K\x01)R.", b"X\xff\xff\xff\xff.", b"K\x01Q.", b"(" * 100_000],
)
def test_a_damaged_pickle_is_one_line(data, refused):
    assert refused(data)


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

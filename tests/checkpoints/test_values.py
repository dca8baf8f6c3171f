"""Archives of torch.save: what torch's weights-only load refuses, and what it would return too much, is one line."""

import io
import random
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hostile import Evil, saved
from refusals import refused

from megatron_scalerl.checkpoints.safe_index import ByteRange
from megatron_scalerl.checkpoints.safe_megatron import _ARRAYS
from megatron_scalerl.checkpoints.safe_values import find_tensor, read_object, read_tensor


@pytest.fixture
def read(tmp_path):
    """Reads an archive behind other bytes of a file."""

    def run(content, reader=read_tensor, key="weight", **options):
        (tmp_path / "file").write_bytes(b"before" + content + b"after")
        return reader(tmp_path, ByteRange("file", 6, len(content)), key, **options)

    return run


def test_states_of_generators_are_read(read):
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    [found] = read(saved([states]), read_object, names=_ARRAYS)
    assert found["python"] == states["python"] and torch.equal(found["torch"], states["torch"])
    for ours, theirs in zip(found["numpy"], states["numpy"], strict=True):
        assert np.array_equal(ours, theirs) and type(ours) is type(theirs)
    np.random.set_state(tuple(found["numpy"]))


@pytest.mark.parametrize(
    "value, found",
    [
        (Namespace(lr=1), "the pickled name argparse.Namespace is not"),
        (np.zeros(2), "the pickled name numpy._core.multiarray._reconstruct is not"),
        (np.float64(1.0), "the pickled name numpy._core.multiarray.scalar is not"),
        (torch.nn.Linear(1, 1), "the pickled name torch.nn.modules.linear.Linear is not"),
        (torch.storage._load_from_bytes, r"the pickled name \S+load_from_bytes is not"),
        (io.BytesIO(b"abc"), "the pickled name _io.BytesIO is not"),
        ({1, 2}, "found a set"),
        (torch.float32, "found a dtype"),
        (torch.nn.Parameter(torch.zeros(1)), "found a Parameter"),
        (torch.zeros(2).to_sparse(), "found a Tensor"),
        (torch.zeros(2, device="meta"), "found a Tensor"),
    ],
    ids=lambda v: v[:24] if isinstance(v, str) else type(v).__name__,
)
def test_anything_but_a_tensor_is_refused_by_name(value, found, read):
    torch.serialization.add_safe_globals([Namespace])  # as Megatron-Core does for its own loads
    with refused(rf"file: cannot read weight from byte 6 on: {found}"):
        read(saved(value))
    assert Namespace in torch.serialization.get_safe_globals()


def test_a_hostile_value_has_no_effect(read, tmp_path):
    with refused(r"the pickled name posix\.mkdir is not allowed"):
        read(saved([Evil(tmp_path / "made")]), read_object)
    assert not (tmp_path / "made").exists()


def test_extra_states_must_be_empty(read):
    """Transformer Engine unpickles the bytes of a tensor that it finds there."""
    key = "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"
    assert read(saved([None]), read_object, key) == [None]
    assert len(read(saved([torch.empty(0, dtype=torch.uint8)]), read_object, key)) == 1
    ring = []
    ring.append(ring)
    for value in ([torch.zeros(4, dtype=torch.uint8)], [b"abc"], [{}], {}, ring):
        with refused(r"linear_fc1._extra_state\S* is not empty"):
            read(saved(value), read_object, key)


class Renamed:
    """Pickled as a tensor with attributes, which torch's weights-only load sets."""

    def __init__(self, tensor, **attributes):
        self.tensor = tensor
        self.attributes = attributes

    def __reduce__(self):
        rebuild, arguments = self.tensor.__reduce_ex__(2)[:2]
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, self.attributes)


def test_attributes_of_a_tensor_do_not_stand_in_for_its_methods(read):
    """`state.numel()` is Transformer Engine's question before it unpickles the bytes of a state."""
    state = Renamed(torch.zeros(4, dtype=torch.uint8), numel=OrderedDict)
    with refused("is not empty"):
        read(saved([state]), read_object, "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1")
    with refused("only a dense CPU tensor"):
        read(saved(state))


def archive(pickled, entries=()):
    """An archive of a pickle and entries."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for name, content in entries:
            file.writestr(f"archive/{name}", content)
    return stream.getvalue()


def view(count, offset, shape, strides):
    """The pickle of a tensor of `count` floats in entry 0."""

    def numbers(values):
        return b"(" + b"".join(b"\x8a\x0a" + v.to_bytes(10, "little", signed=True) for v in values) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    storage += b"J" + struct.pack("<i", count) + b"tQ"
    sizes = b"J" + struct.pack("<i", offset) + numbers(shape) + numbers(strides)
    rest = b"\x89ccollections\nOrderedDict\n)RtR."
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + sizes + rest


ENTRIES = [("data/0", b"\0" * 16), ("version", b"3\n")]


def test_torch_loads_the_tensors_of_this_test(read):
    assert torch.equal(read(archive(view(4, 0, (2, 2), (2, 1)), ENTRIES)), torch.zeros(2, 2))


@pytest.mark.parametrize(
    "arguments",
    [
        (4, 0, (5,), (1,)),
        (4, 3, (2,), (1,)),
        (4, 0, (2, 2), (2, -1)),
        (4, -1, (2,), (1,)),
        (4, 0, (1 << 62, 2), (1, 1)),
        (4, 0, (2, 2), (2,)),
        (1 << 30, 0, (1,), (1,)),
    ],
)
def test_a_tensor_beyond_its_bits_is_refused(arguments, read):
    for reader in (read_tensor, lambda folder, place, _: find_tensor(folder, place)):
        with refused(r"file: cannot read (weight|a saved tensor) from byte 6 on: "):
            read(archive(view(*arguments), ENTRIES), reader)


def test_archives_of_other_kinds_are_refused(read):
    old = io.BytesIO()
    torch.save({"a": 1}, old, _use_new_zipfile_serialization=False)
    for content in (archive(view(4, 0, (4,), (1,))), b"cposix\nmkdir\n.", old.getvalue()):
        with refused("file: cannot read weight from byte 6 on: "):
            read(content)


@pytest.mark.parametrize("at", range(0, 1300, 61))
def test_a_damaged_archive_is_one_error(at, read):
    content = bytearray(saved({"a": torch.zeros(3), "b": [1, "text", (2.5,)]}))
    content[at % len(content)] ^= 0xFF
    try:
        read(bytes(content), read_object)
    except ValueError as error:
        assert "\n" not in str(error)

"""Values of torch.save are read as torch reads them; objects, views beyond their bits and bombs are not."""

import io
import random
import struct
import zipfile
from argparse import Namespace

import numpy as np
import pytest
import torch
from hostile import Evil, saved

from megatron_scalerl.checkpoints.plain_files import PlainFile
from megatron_scalerl.checkpoints.safe_index import ByteRange
from megatron_scalerl.checkpoints.safe_values import read_object, read_value


@pytest.fixture
def read(tmp_path):
    """Reads a value behind other bytes of a file."""

    def run(content, key=None):
        (tmp_path / "file").write_bytes(b"before" + content + b"after")
        with PlainFile(tmp_path, "file") as file:
            if key is not None:
                place = ByteRange(file="file", start=6, length=len(content))
                return read_object(file, key, place)
            return read_value(file, 6, len(content))

    return run


def test_states_of_generators_are_read(read):
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    value = [{**states, "none": {}}]
    [found] = read(saved(value), key="generators/shard_0_1")
    assert found["python"] == value[0]["python"] and found["none"] == {}
    assert torch.equal(found["torch"], value[0]["torch"])
    for ours, theirs in zip(found["numpy"], value[0]["numpy"], strict=True):
        assert np.array_equal(ours, theirs) and type(ours) is type(theirs)
    np.random.set_state(tuple(found["numpy"]))
    assert found["numpy"][1].dtype == np.uint32 and found["numpy"][1].flags.writeable


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(9)[2:5],
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.int16).reshape(1, 2, 3),
    ],
    ids=["transposed", "slice", "scalar", "empty", "bool", "int16"],
)
def test_tensors_equal_those_that_torch_loads(tensor, read):
    found = read(saved({"a": tensor, "b": tensor}))
    assert found["a"].dtype == tensor.dtype and found["a"].shape == tensor.shape and torch.equal(found["a"], tensor)
    if tensor.numel():
        found["a"].zero_()
        assert torch.equal(found["b"], torch.zeros_like(tensor)), "tensors of one storage share it"


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))])
def test_arrays_keep_their_order(array, read):
    found = read(saved(array))
    assert np.array_equal(found, array) and found.dtype == array.dtype


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Namespace(lr=1), "the name argparse.Namespace"),
        (np.array([{}], dtype=object), ""),
        (np.float64(1.0), "the name numpy._core.multiarray.scalar"),
        (np.array(["text"]), ""),
        (np.zeros(1, dtype=[("a", "i4")]), ""),
        ({1, 2}, "a set is among them"),
        ({(1, 2): 3}, "a dict is among them"),
        (bytearray(b"ab"), "a bytearray is among|the name"),
        (torch.nn.Linear(1, 1), "the name torch.nn.modules.linear.Linear"),
        (torch.float32, "a dtype is among"),
        (torch.storage._load_from_bytes, r"the name [\w.]+load_from_bytes"),
        (torch.nn.Parameter(torch.zeros(1)), "a Parameter is among"),
        (torch.zeros(2).to_sparse(), "a Tensor is among"),
        (torch.zeros(2, device="meta"), "a Tensor is among"),
        (io.BytesIO(b"abc"), "the name _io.BytesIO"),
    ],
    ids=lambda v: v[:24] if isinstance(v, str) else type(v).__name__,
)
def test_other_values_are_refused_by_name(value, found, read):
    with pytest.raises(ValueError, match=rf"file: the bytes from 6 on are not plain values: .*({found})"):
        read(saved(value))


def test_a_hostile_value_has_no_effect(read, tmp_path):
    with pytest.raises(ValueError, match=r"the name posix\.mkdir is not allowed"):
        read(saved([Evil(tmp_path / "made")]))
    assert not (tmp_path / "made").exists()


def test_extra_states_must_be_empty(read):
    """Transformer Engine unpickles the bytes of a tensor that it finds there."""
    key = "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"
    assert read(saved([None]), key) == [None]
    assert len(read(saved([torch.empty(0, dtype=torch.uint8)]), key)) == 1
    for content in (torch.zeros(4, dtype=torch.uint8), b"abc", {}, "text", np.zeros(3)):
        with pytest.raises(ValueError, match=r"decoder.layers.0.mlp.linear_fc1._extra_state\S* is not empty"):
            read(saved([content]), key)
    with pytest.raises(ValueError, match=" is a dict; Megatron stores a list"):
        read(saved({}), key)


def archive(pickled, entries=(), compression=zipfile.ZIP_STORED):
    """An archive of a pickle and entries."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
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


def test_torch_loads_the_tensors_of_this_test(read):
    content = archive(view(4, 0, (2, 2), (2, 1)), [("data/0", b"\0" * 16), ("version", b"3\n")])
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), torch.zeros(2, 2))
    assert torch.equal(read(content), torch.zeros(2, 2))


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
    with pytest.raises(ValueError, match="file: the bytes from 6 on are not plain values: "):
        read(archive(view(*arguments), [("data/0", b"\0" * 16), ("version", b"3\n")]))


def test_archives_of_other_kinds_are_refused(read):
    plain = view(4, 0, (4,), (1,))
    old = io.BytesIO()
    torch.save({"a": 1}, old, _use_new_zipfile_serialization=False)
    for content in (archive(plain), b"cposix\nmkdir\n.", old.getvalue()):
        with pytest.raises(ValueError, match="file: the bytes from 6 on are not plain values: "):
            read(content)


@pytest.mark.parametrize("at", range(0, 1300, 61))
def test_a_damaged_archive_is_one_error(at, read):
    content = bytearray(saved({"a": torch.zeros(3), "b": [1, "text", (2.5,)]}))
    content[at % len(content)] ^= 0xFF
    try:
        read(bytes(content))
    except ValueError as error:
        assert "\n" not in str(error)


def test_values_that_contain_themselves_are_refused(read):
    """Thirty lists, each twice in the next, would be a billion items."""
    value = ["x"]
    for _ in range(30):
        value = [value, value]
    with pytest.raises(ValueError, match=r"nested more than 32 deep, or are more than 1048576$"):
        read(saved(value))
    ring = []
    ring.append(ring)
    with pytest.raises(ValueError, match="nested more than 32 deep"):
        read(saved(ring))

"""Tensors as torch.save writes them, without torch: each side reads what the other wrote."""

import io
import zipfile

import numpy as np
import pytest
import torch

from megatron_scalerl.checkpoints.assembly import BITS, TORCH_NAMES
from megatron_scalerl.checkpoints.plain_files import MappedFile
from megatron_scalerl.checkpoints.safe_index import ByteRange
from megatron_scalerl.checkpoints.safe_values import find_tensor
from megatron_scalerl.checkpoints.torch_archive import append_tensor


@pytest.mark.parametrize("dtype", TORCH_NAMES)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 4, 3), (1, 1, 2, 6)])
def test_torch_reads_an_archive_behind_other_bytes(dtype, shape, tmp_path):
    torch.manual_seed(1)
    tensor = torch.randn(shape).to(getattr(torch, TORCH_NAMES[dtype]))
    rows = tensor.reshape(-1, shape[-1]).view(torch.int32 if dtype == "F32" else torch.int16).numpy()
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"before")
        length = append_tensor(file, dtype, shape, [rows.view(BITS[dtype])[:1], rows.view(BITS[dtype])[1:]])
        file.write(b"after")
    archive = path.read_bytes()[6:-5]
    assert len(archive) == length
    assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), tensor)
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None  # all checksums match
    found = find_tensor(tmp_path, ByteRange("file", 6, length))
    assert found[:2] == (dtype, shape) and found[2] % 64 == 0


def test_an_archive_of_torch_is_read(tmp_path):
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(1, 3, 4)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    path = tmp_path / "file"
    path.write_bytes(b"xx" + stream.getvalue())
    dtype, shape, start = find_tensor(tmp_path, ByteRange("file", 2, len(stream.getvalue())))
    assert (dtype, shape) == ("BF16", (1, 3, 4))
    found = MappedFile(path).array(start, 12, np.dtype(np.uint16))
    assert found.tobytes() == tensor.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("value", [torch.zeros(3, 4).t(), torch.zeros(6)[2:], {"a": torch.zeros(2)}])
def test_anything_but_a_contiguous_tensor_is_refused(value, tmp_path):
    path = tmp_path / "file"
    torch.save(value, path)
    with pytest.raises(ValueError, match=r"file: cannot read a saved tensor from byte 0 on: (the tensor|found a )"):
        find_tensor(tmp_path, ByteRange("file", 0, path.stat().st_size))


@pytest.mark.parametrize(
    "change, compression",
    [
        (lambda name, content: content, zipfile.ZIP_DEFLATED),
        (lambda name, content: content[:-4] if name.endswith("data/0") else content, zipfile.ZIP_STORED),
        (lambda name, content: b"big" if name.endswith("byteorder") else content, zipfile.ZIP_STORED),
    ],
    ids=["compressed", "short", "big-endian"],
)
def test_bits_that_cannot_be_mapped_are_refused(change, compression, tmp_path):
    original = io.BytesIO()
    torch.save(torch.arange(100.0), original)
    path = tmp_path / "file"
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(path, "w", compression) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, change(entry.filename, source.read(entry)))
    with pytest.raises(ValueError, match="file: cannot read a saved tensor from byte 0 on: "):
        find_tensor(tmp_path, ByteRange("file", 0, path.stat().st_size))

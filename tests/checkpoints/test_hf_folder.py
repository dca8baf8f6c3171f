"""Hugging Face folders: slices of every float type are read, wrong folders are named."""

import json

import pytest
import torch
from refusals import refused
from safetensors.torch import save_file

from megatron_scalerl.checkpoints.hf_folder import INDEX, HfReader, open_folder

TENSORS = {
    "a.weight": torch.arange(24.0).view(4, 6),
    "b.weight": torch.arange(60.0).view(3, 4, 5),
    "vision_model.weight": torch.ones(2),
}


@pytest.fixture
def source(tmp_path):
    """A folder of two shards with an index, a tokenizer and a config with dtype bfloat16."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, folder / f"part-{number}.safetensors")
    index = {name: f"part-{number}.safetensors" for number, name in enumerate(TENSORS)}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type_is_read_bit_for_bit(dtype, tmp_path):
    tensor = torch.randn(5, 7).to(dtype)
    save_file({"b": torch.ones(3, dtype=torch.uint8), "w": tensor}, tmp_path / "model.safetensors")
    reader = HfReader(open_folder(tmp_path))
    found = reader.read("w", (slice(1, 4), 2), (5, 7))
    assert found.dtype == dtype and torch.equal(found, tensor[1:4, 2])
    with refused(r"model.safetensors: b: the type U8 is not supported, only F64, F32, BF16, F16"):
        reader.read("b", (slice(0, 3),), (3,))


def test_wrong_folders_are_refused_in_one_line(source, tmp_path):
    reader = HfReader(open_folder(source))
    with refused(r"the folder has no tensor c\.weight"):
        reader.read("c.weight", (slice(0, 1),), (1,))
    with refused(r"a.weight: the tensor has shape \[4, 6\], but the config says \[5, 6\]"):
        reader.read("a.weight", (slice(0, 1), slice(0, 1)), (5, 6))
    (source / "part-1.safetensors").unlink()
    with refused(r"part-1.safetensors: this file is missing"):
        open_folder(source)
    with refused(r"the folder has no \*.safetensors.*GGUF"):
        open_folder(tmp_path)


def entry(low, high, shape=(1,)):
    return {"dtype": "F32", "shape": shape, "data_offsets": [low, high]}


@pytest.mark.parametrize(
    "header, data",
    [
        (json.dumps({"a": entry(0, 8, [2]), "b": entry(4, 8)}), 8),  # they overlap
        (json.dumps({"a": entry(0, 4), "b": entry(8, 12)}), 12),  # a hole
        (json.dumps({"a": entry(0, 4, [-1])}), 4),
        ("[" * 100_000, 4),
    ],
)
def test_a_header_that_safetensors_refuses_is_refused(header, data, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(data))
    with refused(r"model\.safetensors: this is not a complete safetensors file"):
        open_folder(tmp_path)

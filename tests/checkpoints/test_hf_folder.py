"""Hugging Face folders: slices read, wrong folders named, generation keys added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_scalerl.checkpoints.hf_folder import INDEX, HfReader, add_generation_keys

TENSORS = {
    "a.weight": torch.arange(24.0).view(4, 6),
    "b.weight": torch.arange(60.0).view(3, 4, 5),
    "vision_model.weight": torch.ones(2),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of two shards with an index, a tokenizer and a config that says bfloat16."""
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


def test_a_slice_is_read_and_an_expert_drops_its_dimension(source: Path) -> None:
    reader = HfReader(source)
    assert set(reader.names) == set(TENSORS)
    found = reader.read("a.weight", (slice(1, 3), slice(2, 6)), (4, 6))
    assert torch.equal(found, TENSORS["a.weight"][1:3, 2:6])
    expert = reader.read("b.weight", (2, slice(0, 4), slice(1, 3)), (3, 4, 5))
    assert torch.equal(expert, TENSORS["b.weight"][2, :, 1:3])


def test_wrong_folders_are_one_clear_line(source: Path, tmp_path: Path) -> None:
    reader = HfReader(source)
    with pytest.raises(ValueError, match=r"expected tensor c\.weight, found none of that name"):
        reader.read("c.weight", (slice(0, 1),), (1,))
    with pytest.raises(ValueError, match=r"a.weight: expected shape \[5, 6\], found \[4, 6\]"):
        reader.read("a.weight", (slice(0, 1), slice(0, 1)), (5, 6))
    (source / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index.json: expected file part-1.safetensors, found none"):
        HfReader(source)
    with pytest.raises(ValueError, match=r"expected \*.safetensors, found none"):
        HfReader(tmp_path)


def test_generation_keys_are_added_to_the_existing_ones(tmp_path: Path) -> None:
    """vLLM reads Llama 4's attention temperature there; a folder without the file keeps its special tokens."""
    keys = {"attn_temperature_tuning": True}
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": [3, 4], "_from_model_config": true}')
    add_generation_keys(tmp_path, {})
    assert json.loads(file.read_text()) == {"eos_token_id": [3, 4], "_from_model_config": True}
    add_generation_keys(tmp_path, keys)
    assert json.loads(file.read_text()) == {"eos_token_id": [3, 4], **keys}
    file.unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 2, "pad_token_id": null}}')
    add_generation_keys(tmp_path, keys)
    assert json.loads(file.read_text()) == {"eos_token_id": 2, **keys}

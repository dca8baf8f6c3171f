"""Hugging Face folders: slices read, shards written, nothing half-written, wrong folders named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_scalerl.checkpoints import hf_folder
from megatron_scalerl.checkpoints.hf_folder import INDEX, HfReader, HfWriter
from megatron_scalerl.checkpoints.manifest import manifest_of

TENSORS = {
    "a.weight": torch.arange(24.0).view(4, 6),
    "b.weight": torch.arange(60.0).view(3, 4, 5),
    "vision_model.weight": torch.ones(2),
}
MANIFEST = manifest_of([("a.weight", "float32", (4, 6)), ("b.weight", "float32", (3, 4, 5))])


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


def write(source: Path, out: Path, *, carried: tuple[str, ...] = ()) -> None:
    with HfWriter(source, out, MANIFEST, carried=carried) as writer:
        for meta in MANIFEST:
            writer.add(meta.name, TENSORS[meta.name] + 1)


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


def test_a_written_folder_is_whole_and_says_its_dtype(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(source, out)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text()) == {"dtype": "float32", "model_type": "llama"}
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[meta.name], TENSORS[meta.name] + 1) for meta in MANIFEST)
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_shards_carry_an_index_and_the_vision_tower(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_folder, "SHARD_BYTES", 100)
    out = tmp_path / "out"
    write(source, out, carried=("vision_model.",))
    reader = HfReader(out)
    assert set(reader.names) == set(TENSORS)
    assert torch.equal(reader.whole("vision_model.weight"), TENSORS["vision_model.weight"])
    assert torch.equal(reader.whole("b.weight"), TENSORS["b.weight"] + 1)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * (24 + 60 + 2)
    assert index["weight_map"]["b.weight"] == "model-00002-of-00002.safetensors"


def test_a_failure_leaves_the_old_folder_as_it_was(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(source, out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(RuntimeError, match="a rank died"), HfWriter(source, out, MANIFEST) as writer:
        writer.add("a.weight", TENSORS["a.weight"])
        raise RuntimeError("a rank died")
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_an_older_policy_is_replaced_and_anything_else_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(source, out)
    (out / "stale.json").write_text("{}")
    write(source, out)
    assert not (out / "stale.json").exists()
    other = tmp_path / "notes"
    other.mkdir()
    with pytest.raises(ValueError, match="expected no such path or a Hugging Face folder"):
        HfWriter(source, other, MANIFEST)


def test_generation_keys_join_what_is_there(source: Path, tmp_path: Path) -> None:
    """vLLM reads Llama 4's attention temperature there; a folder without the file keeps its special tokens."""
    keys = {"attn_temperature_tuning": True}
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 4], "_from_model_config": true}')
    for out in ("with", "without"):
        with HfWriter(source, tmp_path / out, MANIFEST, generation=keys) as writer:
            for meta in MANIFEST:
                writer.add(meta.name, TENSORS[meta.name])
        (source / "generation_config.json").unlink(missing_ok=True)
        (source / "config.json").write_text('{"text_config": {"eos_token_id": 2, "pad_token_id": null}}')
    found = [json.loads((tmp_path / out / "generation_config.json").read_text()) for out in ("with", "without")]
    assert found == [{"eos_token_id": [3, 4], **keys}, {"eos_token_id": 2, **keys}]

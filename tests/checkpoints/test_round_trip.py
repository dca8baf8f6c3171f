"""Hugging Face -> Megatron -> Hugging Face gives the same bytes, files and index, for every family."""

import json
import re
from itertools import product

import numpy as np
import pytest
import torch
from random_policies import KINDS, make
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sampling import sampled

from megatron_scalerl.checkpoints import assembly
from megatron_scalerl.checkpoints.assembly import bands
from megatron_scalerl.checkpoints.commit import read_commit
from megatron_scalerl.checkpoints.conversion import Options
from megatron_scalerl.checkpoints.hf_folder import INDEX, family_of_folder, open_folder
from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.checkpoints.to_megatron import to_megatron
from megatron_scalerl.checkpoints.verify import verify
from megatron_scalerl.checkpoints.views import sources
from megatron_scalerl.checkpoints.weight_map import check_weights, parameter_assembly


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Folder of a kind in a type, created once."""
    made = {}

    def folder(kind, dtype=torch.float32):
        if (kind, dtype) not in made:
            made[kind, dtype] = tmp_path_factory.mktemp(kind) / "hf"
            make(kind, made[kind, dtype], dtype=dtype)
        return made[kind, dtype]

    return folder


OUTSIDE = {
    "vision_model.count": torch.tensor(3),
    "vision_model.nan": torch.tensor([[torch.nan, 1.0]], dtype=torch.float64),
    "vision_model.infinite": torch.full((2, 3), torch.inf),
    "vision_model.none": torch.zeros(0, 3, dtype=torch.bool),
    "vision_model.scale": torch.ones(5).to(torch.float8_e4m3fn),
}
"""Tensors that a policy's weights may not be."""


def split(source, target, parts):
    """The folder with its tensors distributed over several files and an index."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors") | OUTSIDE
    weight_map = {}
    for number in range(parts):
        file = f"model-{number + 1:05d}-of-{parts:05d}.safetensors"
        mine = {name: tensors[name] for name in sorted(tensors)[number::parts]}
        save_file(mine, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_parameters": 7, "total_size": 0}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index))
    for extra in source.glob("*.json"):
        (target / extra.name).write_text(extra.read_text())
    (target / "chat_template.jinja").write_text("{{ messages }}")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    return target


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("kind, dtype", sampled("round trip", product(KINDS, DTYPES), 6))
def test_every_byte_comes_back(kind, dtype, policies, tmp_path, monkeypatch):
    # small bands, chunks and files, so that tensors and checkpoints are split as large ones are
    monkeypatch.setattr("megatron_scalerl.checkpoints.to_megatron.CHUNK_BYTES", 3000)
    monkeypatch.setattr("megatron_scalerl.checkpoints.to_megatron._MIN_FILE_BYTES", 100_000)
    monkeypatch.setattr(assembly, "BAND_BYTES", 1000)
    source = policies(kind, DTYPES[dtype])
    there = to_megatron(source, tmp_path / "megatron", Options(verify=True))
    back = to_hf(tmp_path / "megatron", tmp_path / "back", Options(verify=True))
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 2
    assert there.tensors == back.tensors == len(open_folder(source).tensors)
    assert there.nbytes == back.nbytes == sum(t.nbytes for t in open_folder(source).tensors.values())
    for path in source.iterdir():
        if path.name != "generation_config.json":  # Llama 4's gets keys that vLLM needs
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    assert {p.name for p in (tmp_path / "back").iterdir()} - {p.name for p in source.iterdir()} == {"conversion.json"}


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16])
def test_what_a_release_with_latent_attention_has_beside_the_policy_comes_back(bias, policies, tmp_path):
    """Rotary frequencies, a layer of multi-token prediction, and a router's bias in either type."""
    source = tmp_path / "source"
    source.mkdir()
    folder = policies("moonlight", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.rand(4) for n in range(4)}
    tensors |= {"model.layers.4.eh_proj.weight": torch.rand(64, 128), "model.layers.4.enorm.weight": torch.rand(64)}
    names = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert len(names) == 3 and all(not torch.equal(tensors[n], tensors[n].bfloat16().float()) for n in names)
    tensors |= {name: tensors[name].to(bias) for name in names}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    check_weights(source)
    to_megatron(source, tmp_path / "megatron", Options(dtype="F32", verify=True))
    to_hf(tmp_path / "megatron", tmp_path / "back", Options(dtype="BF16", verify=True))
    after = load_file(tmp_path / "back/model.safetensors")
    assert after.keys() == tensors.keys()
    assert all(after[n].dtype == t.dtype and torch.equal(after[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.4.enorm.weight"])
def test_folders_with_another_router_bias_or_prediction_layer_differ_in_any_type(name, policies, tmp_path):
    """Both stay in fp32 in a bf16 folder; a difference below bf16's is one. All else is compared in --dtype."""
    folder = policies("moonlight", torch.bfloat16)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    tensors = load_file(folder / "model.safetensors") | {"model.layers.4.enorm.weight": torch.rand(64)}
    near = tensors[name].clone()
    near[0] = torch.nextafter(near[0], torch.tensor(9.0))
    assert not torch.equal(near, tensors[name]) and torch.equal(near.bfloat16(), tensors[name].bfloat16())
    wide = {other: tensor.float() for other, tensor in tensors.items()}
    for place, content in {"first": tensors, "wide": wide, "second": tensors | {name: near}}.items():
        (tmp_path / place).mkdir()
        save_file(content, tmp_path / place / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / place / "config.json").write_text(json.dumps(config))
    verify(tmp_path / "first", tmp_path / "wide", Options(dtype="BF16"))
    for dtype in (None, "BF16"):
        with refused(rf"second: .*{re.escape(name)}$"):
            verify(tmp_path / "first", tmp_path / "second", Options(dtype=dtype))


@pytest.mark.parametrize("kind", ["llama_biased", "qwen3_moe", "llama4"])
def test_parameters_are_those_that_the_trainer_loads(kind, policies):
    """Two readings of the same rules: the converter's assemblies, and the trainer's pieces."""
    source = policies(kind)
    tensors = load_file(source / "model.safetensors")
    read = sources(open_folder(source))
    rules = [rule for rule in family_of_folder(source).rules if rule.exported]
    for rule in rules:
        assembled = parameter_assembly(rule, "F32", "F32")
        found = np.concatenate([np.array(rows) for rows in bands(assembled, read)]).view(np.float32)
        expected = torch.full(assembled.shape, torch.nan)
        for piece in rule.pieces(0, 1):
            piece.of_shard(expected).copy_(tensors[piece.hf_name][piece.hf_index])
        assert torch.equal(torch.from_numpy(found).reshape(assembled.shape), expected), rule.megatron
    assert len(rules) > 20


def test_shards_index_and_side_files_come_back(policies, tmp_path):
    source = split(policies("llama4_multimodal"), tmp_path / "source", 3)
    to_megatron(source, tmp_path / "megatron", Options(verify=True))
    to_hf(tmp_path / "megatron", tmp_path / "back", Options(verify=True))
    verify(source, tmp_path / "back", Options(dtype="BF16"))
    ours = open_folder(tmp_path / "back")
    assert ours.shards == open_folder(source).shards and ours.tensors == open_folder(source).tensors
    for shard in ours.shards:
        assert (tmp_path / "back" / shard.file).read_bytes() == (source / shard.file).read_bytes()
    index, before = (json.loads((folder / INDEX).read_text()) for folder in (tmp_path / "back", source))
    assert index["weight_map"] == before["weight_map"]
    size = sum(t.nbytes for t in ours.tensors.values())
    assert index["metadata"] == {"total_parameters": 7, "total_size": size}
    for name in ("chat_template.jinja", "config.json", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    generation = json.loads((tmp_path / "back/generation_config.json").read_text())
    assert generation["attn_temperature_tuning"] is True
    # Nothing of the vision tower is in Megatron's own files.
    with safe_open(tmp_path / "megatron/hugging_face/carried.safetensors", "pt") as stored:
        assert {name.split(".")[0] for name in stored.keys()} == {"vision_model", "multi_modal_projector"}  # noqa: SIM118


def test_another_type_is_rounded_once_and_set_in_the_config(policies, tmp_path):
    source = policies("llama4_multimodal")
    to_megatron(source, tmp_path / "megatron", Options(dtype="BF16", verify=True))
    to_hf(tmp_path / "megatron", tmp_path / "back", Options(verify=True))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    for name, tensor in before.items():
        outside = not name.startswith("language_model.")
        assert torch.equal(after[name], tensor if outside else tensor.bfloat16()), name
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    verify(source, tmp_path / "megatron", Options(dtype="BF16"))
    with refused(r" is BF16 .*, but F32 "):
        verify(source, tmp_path / "megatron")


def test_a_copy_of_the_tied_embedding_is_written_again(policies, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(policies("llama_tied") / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text((policies("llama_tied") / "config.json").read_text())
    to_megatron(source, tmp_path / "megatron", Options(verify=True))
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with refused(r"lm_head.weight: .* model.embed_tokens.weight"):
        to_megatron(source, tmp_path / "other")


def test_the_record_has_every_tensor_with_the_same_checksum_on_both_sides(policies, tmp_path):
    import xxhash

    source = policies("qwen3_moe")
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    one, other = (json.loads((tmp_path / n / "conversion.json").read_text()) for n in ("megatron", "back"))
    assert one["tensors"] == other["tensors"] and one["checksum"] == "xxh3_64"
    for name, tensor in load_file(source / "model.safetensors").items():
        entry = one["tensors"][name]
        digest = xxhash.xxh3_64(tensor.numpy().tobytes()).hexdigest()
        assert entry == {"dtype": "F32", "shape": list(tensor.shape), "checksum": digest}
    assert read_commit(tmp_path / "megatron")["family"] == "qwen3_moe"

"""Invalid input: one line that names it, exit code 2, and no file left behind."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import command
from random_policies import make
from safetensors.torch import load_file, save_file

from megatron_scalerl.checkpoints import conversion
from megatron_scalerl.checkpoints.hf_folder import INDEX
from megatron_scalerl.checkpoints.to_megatron import to_megatron

ROOT = Path(__file__).parent.parent.parent
main = command("convert")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A llama in one file."""
    folder = tmp_path_factory.mktemp("policy") / "hf"
    make("llama", folder)
    return folder


@pytest.fixture
def source(policy, tmp_path):
    """The policy in two files with an index, to be modified by a test."""
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = load_file(policy / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:15], "model-00002-of-00002.safetensors": names[15:]}
    for file, mine in files.items():
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, mine in files.items() for name in mine}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text((policy / "config.json").read_text())
    return folder


@pytest.fixture
def refused(source, tmp_path, capsys):
    """Runs a conversion of the source that must fail, and returns its one-line message."""

    def run(*more, command="to-megatron", origin=source, name="out"):
        before = set(tmp_path.iterdir())
        assert main([command, str(origin), str(tmp_path / name), *more]) == 2
        said = capsys.readouterr()
        lines = said.err.splitlines()
        assert len(lines) == 1 and said.out == "", said
        assert set(tmp_path.iterdir()) == before, "something was left behind"
        return lines[0]

    return run


def rewrite(folder, number, change):
    """Applies `change` to the tensors of one file."""
    file = folder / f"model-0000{number}-of-00002.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(path, change):
    """Applies `change` to the content of a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_good_folder_is_converted(source, tmp_path, capsys):
    assert main(["to-megatron", str(source), str(tmp_path / "out"), "--verify"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "39 tensors, 610.75 KiB written in" in said.out and "compared bit for bit" in said.out
    assert main(["verify", str(source), str(tmp_path / "out")]) == 0
    assert "39 tensors, 610.75 KiB, equal bit for bit" in capsys.readouterr().out


def test_a_missing_shard(source, refused):
    (source / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: this file is missing" in refused()


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_truncated_shard(keep, source, refused):
    file = source / "model-00001-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert f"{file}: this is not a complete safetensors file: " in refused()


def test_an_index_with_a_tensor_that_its_file_lacks(source, refused):
    edit_json(source / INDEX, lambda c: c["weight_map"].update({"model.ghost": "model-00001-of-00002.safetensors"}))
    said = refused()
    assert f"{INDEX}: " in said and "model-00001-of-00002.safetensors does not contain the tensor model.ghost" in said


def test_missing_tensors_are_listed(source, refused):
    rewrite(source, 2, lambda t: [t.pop(n) for n in list(t) if "layers.3.self_attn" in n])
    kept = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (source / INDEX).unlink()
    assert {p.name for p in source.glob("*.safetensors")} == kept  # without an index every file counts
    said = refused()
    names = [f"model.layers.3.self_attn.{p}_proj.weight" for p in "qkvo"]
    assert f"{source}: the folder lacks tensors of the policy: {', '.join(names)}" in said


NORM = "model.norm.weight"
KEYS = "model.layers.3.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    "changes, options, line",
    [
        (
            lambda t: {"model.extra": torch.ones(2), "score.weight": torch.ones(2)},
            (),
            ": a llama policy does not have the tensors model.extra, score.weight",
        ),
        (lambda t: {NORM: torch.ones(63)}, (), f"{NORM}: the tensor has shape [63], but config.json says [64]"),
        (lambda t: {NORM: torch.ones(64).double()}, (), f"{NORM}: the type F64 is not supported, only"),
        (lambda t: {KEYS: t[KEYS].bfloat16()}, (), "types: BF16, F32"),
        (lambda t: {NORM: torch.full((64,), 1e6)}, ("--dtype", "float16"), f"{NORM}: the tensor has NaN or Inf"),
    ],
    ids=["unexpected", "shape", "type", "mixed types", "too large for the new type"],
)
def test_tensors_that_the_policy_cannot_have(changes, options, line, source, refused):
    rewrite(source, 2, lambda tensors: tensors.update(changes(tensors)))
    assert line in refused(*options)


def test_a_config_that_disagrees_with_the_shapes(source, refused):
    edit_json(source / "config.json", lambda c: c.update(intermediate_size=96))
    assert "mlp.gate_proj.weight: the tensor has shape [128, 64], but config.json says [96, 64]" in refused()


def test_an_unsupported_architecture_lists_the_supported_ones(source, refused):
    edit_json(source / "config.json", lambda c: c.update(model_type="mamba"))
    assert "model_type 'mamba' is not supported: the model has state-space layers (mamba); supp" in refused()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(bad, source, refused, tmp_path, capsys):
    rewrite(source, 2, lambda t: t["model.layers.3.mlp.down_proj.weight"].view(-1)[777].fill_(bad))
    said = refused()
    assert "model.layers.3.mlp.down_proj.weight: the tensor has NaN or Inf" in said
    assert "--allow-nonfinite" in said
    passed = ["to-megatron", str(source), str(tmp_path / "out"), "--allow-nonfinite", "--verify"]
    assert main(passed) == 0
    capsys.readouterr()
    assert "has NaN or Inf" in refused(command="to-hf", origin=tmp_path / "out", name="back")


def test_an_output_that_exists_is_not_touched(source, refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("x")
    assert f"{tmp_path / 'out'}: this path exists already, and is not overwritten" in refused()
    assert (tmp_path / "out/precious").read_text() == "x"


def test_an_output_folder_that_does_not_exist(refused, tmp_path):
    assert f"the folder {tmp_path / 'no/such'} does not exist" in refused(name="no/such/out")


def test_too_little_space_is_reported_before_anything_is_written(refused, monkeypatch, tmp_path):
    usage = conversion.shutil.disk_usage("/")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage._replace(free=60 << 20))
    assert f"{tmp_path / 'out'}: the disk has 60.00 MiB free" in refused()


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle(source, tmp_path):
    """The kernel's own limit on the size of files replaces a full disk: writing fails in the same call."""
    limit = 300_000
    done = subprocess.run(
        [sys.executable, "-m", "megatron_scalerl", "convert", "to-megatron", source, tmp_path / "out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == "megatron-scalerl: __0_0.distcp: it cannot be written: File too large\n"
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


@pytest.fixture
def megatron(source, tmp_path):
    """The policy as a Megatron checkpoint, to be modified by a test."""
    to_megatron(source, tmp_path / "megatron")
    return tmp_path / "megatron"


def test_an_incomplete_checkpoint(megatron, refused):
    (megatron / "__0_0.distcp").unlink()
    assert "__0_0.distcp: this file of the checkpoint is missing" in refused(command="to-hf", origin=megatron)


def test_a_checkpoint_without_its_last_file(megatron, refused):
    (megatron / "metadata.json").unlink()
    (megatron / "COMMIT").unlink()
    said = refused(command="to-hf", origin=megatron)
    assert f"{megatron}: " in said and "metadata.json or .metadata" in said


def test_a_bit_that_flipped_on_the_disk(megatron, refused):
    file = megatron / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said = refused(command="to-hf", origin=megatron)
    assert "__0_0.distcp: the content has changed" in said
    # a file of more than 16 MiB has no digest there
    commit = json.loads((megatron / "COMMIT").read_text())
    del commit["sha256"]["__0_0.distcp"]
    (megatron / "COMMIT").write_text(json.dumps(commit))
    said = refused(command="to-hf", origin=megatron)
    assert "the checksum is " in said and " was recorded" in said


def test_a_difference_is_named(megatron, source, capsys):
    rewrite(source, 2, lambda t: t["model.layers.3.mlp.up_proj.weight"].view(torch.int32).view(-1)[5].bitwise_xor_(1))
    assert main(["verify", str(source), str(megatron)]) == 2
    assert capsys.readouterr().err.endswith(f"differ from {source}: model.layers.3.mlp.up_proj.weight\n")


@pytest.mark.parametrize(
    "change, shapes",
    [
        (
            dict(num_key_value_heads=4, head_dim=16),
            "weight: the checkpoint has shape [4, 128, 64], but the config says [4, 192, 64]",
        ),
        (dict(num_hidden_layers=3), "layer_norm_weight: the checkpoint has shape [4, 64], but the config"),
    ],
)
def test_a_checkpoint_of_another_config(megatron, refused, change, shapes):
    edit_json(megatron / "hugging_face/config.json", lambda c: c.update(change))
    (megatron / "COMMIT").unlink()
    assert f"linear_qkv.{shapes}" in refused(command="to-hf", origin=megatron)


def test_a_stock_checkpoint_without_its_origin(megatron, refused):
    (megatron / "conversion.json").unlink()
    (megatron / "COMMIT").unlink()
    assert "name the policy's original Hugging Face folder with --like" in refused(command="to-hf", origin=megatron)


def test_a_folder_without_a_checkpoint(refused, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty}: this is not a Hugging Face folder" in refused(origin=empty)

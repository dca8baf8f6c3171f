"""Folders whose parts would run code, or write or read elsewhere: one line, exit code 2, no effect."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hostile import Evil, edit_metadata, first_key, place, recommit, saved
from random_policies import make
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_scalerl.__main__ import main as product
from megatron_scalerl.checkpoints.commit import write_commit
from megatron_scalerl.checkpoints.to_megatron import to_megatron

ELSEWHERE = f"/tmp/escaped-{os.getpid()}.safetensors"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """(Hugging Face folder, the checkpoint converted from it)"""
    root = tmp_path_factory.mktemp("originals")
    make("llama", root / "hf")
    to_megatron(root / "hf", root / "megatron")
    return root / "hf", root / "megatron"


@pytest.fixture
def folder(originals, tmp_path):
    """The checkpoint, to be modified by a test."""
    shutil.copytree(originals[1], tmp_path / "megatron")
    return tmp_path / "megatron"


@pytest.fixture
def marker(tmp_path):
    """The folder that a hostile pickle would create."""
    return tmp_path / "made_by_a_pickle"


@pytest.fixture
def refused(originals, folder, marker, tmp_path, capsys):
    """Runs to-hf, verify and export on the folder; all must refuse it with the same line, which is returned."""

    def run(like=True):
        out = tmp_path / "out"
        commands = [["to-hf", str(folder), str(out)], ["verify", str(originals[0]), str(folder)]]
        commands += [["to-hf", str(folder), str(out), "--like", str(originals[0])]] if like else []
        lines = [refusal(product, ["convert", *c]) for c in commands]
        if like:
            run_dir = run_of(folder, originals[0], tmp_path)
            lines.append(refusal(product, ["export", str(run_dir), "--out", str(out)]))
        assert not marker.exists() and not out.exists()
        of_run = str(tmp_path / "run/checkpoints/step_000001")
        lines = [line.split(": ", 1)[1].replace(of_run, str(folder)) for line in lines]
        assert len(set(lines)) == 1, lines
        return lines[0]

    def refusal(command, arguments):
        assert command(arguments) == 2
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == 1 and said.out == "", said
        return said.err.strip()

    return run


def run_of(folder, policy, tmp_path):
    """A run's folder whose checkpoint is `folder`."""
    run_dir = tmp_path / "run"
    shutil.copytree(folder, run_dir / "checkpoints/step_000001", symlinks=True, copy_function=copy_any)
    (run_dir / "checkpoints/step_000001/COMMIT").unlink()
    write_commit(run_dir / "checkpoints/step_000001", {"step": 1})
    recipe = {"name": "run", "steps": 1, "policy": {"path": str(policy)}, "prompts": {"path": "none.jsonl"}}
    (run_dir / "recipe.yaml").write_text(json.dumps(recipe))
    return run_dir


def copy_any(source, target):
    """Copies files and pipes; shutil.copytree would block on a pipe."""
    if os.path.isfile(source):
        shutil.copy2(source, target, follow_symlinks=False)
    else:
        os.mkfifo(target)


@pytest.mark.parametrize("where", [None, "planner_data", "version", "mcore_data"])
def test_a_metadata_file_with_a_call_in_it(where, folder, marker, refused):
    """None: it is a call."""
    call = Evil(marker)
    edit_metadata(folder, lambda m: setattr(m, where, {"a": call}) if where else call)
    said = refused()
    assert said.startswith(f"{folder}/.metadata: ") and "the pickled name posix.mkdir is not allowed" in said


def test_a_tensor_that_calls(folder, marker, refused):
    place(folder, first_key(folder, objects=False), saved(Evil(marker)))
    said = refused()
    assert "/__99_0.distcp: cannot read " in said and "the pickled name posix.mkdir is not allowed" in said


def test_parts_that_are_not_needed_are_not_opened(originals, folder, marker, tmp_path):
    """Neither common.pt nor an object reaches a decoder, so that other programs' settings do not matter."""
    (folder / "common.pt").write_bytes(saved(Evil(marker)))
    place(folder, first_key(folder, objects=True), saved([Evil(marker)]))
    assert product(["convert", "to-hf", str(folder), str(tmp_path / "out")]) == 0
    assert not marker.exists()
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "out", originals[0]))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(
    "info, found",
    [
        (("../outside", 0, 10), "at `$.storage_data[...].relative_path`"),
        (("/etc/passwd", 0, 10), "at `$.storage_data[...].relative_path`"),
        (("__0_0.distcp", -5, 10), "Expected `int` >= 0 - at `$.storage_data[...].offset`"),
        (("__0_0.distcp", 0, -1), "Expected `int` >= 0 - at `$.storage_data[...].length`"),
        (("__0_0.distcp", 0, 10**12), "but .metadata places a value up to byte 1000000000000"),
        (("__0_0.distcp", 10**12, 10), "but .metadata places a value up to byte 1000000000010"),
        (("__0_0.distcp", 10**18, 10), "at `$.storage_data[...].offset`"),
        (("__0_0.distcp", 0, "10"), "Expected `int`, got `str` - at `$.storage_data[...].length`"),
        (("none.distcp", 0, 10), "none.distcp: this file of the checkpoint is missing"),
        (("__0_0.distcp", 3, 100), "__0_0.distcp: cannot read a saved tensor from byte 3 on: no archive"),
    ],
)
def test_places_outside_the_folder_or_the_file(info, found, folder, refused):
    (folder.parent / "outside").write_bytes(b"x" * 20)
    index = first_key(folder, objects=False)
    edit_metadata(folder, lambda m: m.storage_data.__setitem__(index, _StorageInfo(*info)))
    assert found in refused()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "metadata.json"])
def test_links_out_of_the_folder(name, folder, refused):
    shutil.move(folder / name, folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    assert refused().startswith(f"{folder / name}: this path is a symbolic link")


def test_a_pipe_does_not_block(folder, refused):
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    (folder / "COMMIT").unlink()
    assert refused(like=False).endswith("__0_0.distcp: this path is not a regular file")


def test_a_link_beside_the_config_is_not_copied_out(folder, refused):
    (folder.parent / "secret").write_text("secret")
    (folder / "hugging_face/chat_template.jinja").symlink_to(folder.parent / "secret")
    recommit(folder)
    assert "hugging_face/chat_template.jinja: this path is a symbolic link" in refused(like=False)


@pytest.mark.parametrize(
    "change, found",
    [
        (
            lambda c: c["shards"][0].update(file="../../escaped.safetensors"),
            "is not a plain file name",
        ),
        (lambda c: c["shards"][0].update(file=ELSEWHERE), "is not a plain file name"),
        (lambda c: c["shards"][0].update(file="config.json"), r": config.json is not the name of a *.safetensors"),
        (lambda c: c["shards"][0]["tensors"].append("ghost"), "lacks 'ghost'"),
        (lambda c: c.pop("shards"), "missing required field `shards`"),
        (lambda c: c.update(tensors=[]), "Expected `object`, got `array` - at `$.tensors`"),
        (lambda c: c.update(copies={"a": "ghost"}), ": a was recorded as a copy of 'ghost'"),
        (lambda c: c.update(tensors={"a": {}}), "missing required field `dtype` - at `$.tensors[...]`"),
        (lambda c: c.update(index_metadata=3), "Expected `object | null`, got `int` - at `$.index_metadata`"),
    ],
    ids=["parent", "absolute", "config", "ghost", "shards", "tensors", "copies", "entry", "index"],
)
def test_a_record_that_names_files_outside_the_folder(change, found, folder, refused):
    """Files of the result are created under the names in the record."""
    before = {p for p in folder.parent.parent.rglob("*") if p.name.startswith("escaped")}
    content = json.loads((folder / "conversion.json").read_text())
    change(content)
    (folder / "conversion.json").write_text(json.dumps(content))
    recommit(folder)
    assert found in refused(like=False)
    assert {p for p in folder.parent.parent.rglob("*") if p.name.startswith("escaped")} == before
    assert not Path(ELSEWHERE).exists()


@pytest.mark.parametrize("content", [b"{", b'{"sharded_backend": "zarr"}', b"[]", b"[" * 100_000])
def test_other_formats(content, folder, refused):
    (folder / "metadata.json").write_bytes(content)
    recommit(folder)
    assert f"{folder}/metadata.json: " in refused()

"""Checks of this node's disks."""

import os
from pathlib import Path

import pytest

from megatron_scalerl.cluster import node
from megatron_scalerl.cluster.check import GIB, MIB, guarded
from megatron_scalerl.cluster.node import canary, output_space, place_of
from megatron_scalerl.recipe.file import load_recipe


def test_the_output_folder_is_tried_and_left_as_it_was(tmp_path):
    assert place_of(tmp_path / "runs/mine") == tmp_path
    check = canary(tmp_path)
    assert check.status == "ok" and check.found.startswith(f"{tmp_path}: 65,536 bytes written")
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written_or_locked_or_reads_otherwise_fails(tmp_path, monkeypatch):
    assert guarded("output folder", lambda: canary(Path("/proc"))).status == "failed"

    def unsupported(_):
        raise OSError(38, os.strerror(38))

    with monkeypatch.context() as patch:
        patch.setattr(node, "lock_file", unsupported)
        assert guarded("output folder", lambda: canary(tmp_path)).found.startswith(f"[Errno 38] {os.strerror(38)}; ")
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"other")
    assert canary(tmp_path).found.startswith(f"{tmp_path}: the bytes read differ")
    assert list(tmp_path.iterdir()) == []


def test_a_run_needs_its_checkpoints_and_one_more(tmp_path):
    """14 bytes for a parameter in bfloat16: 2 of weights, 4 of main weights, 8 of moments."""
    recipe, parameters = "recipes/scalerl_llama3_8b.yaml", 8_030_261_248
    for dtype, keep, size in (("bfloat16", 2, 14), ("float32", 1, 12)):
        wanted = load_recipe(recipe, [f"policy.dtype={dtype}", f"checkpoint.keep={keep}"])
        assert node._checkpoint_bytes(wanted, recipe) == (keep + 1) * parameters * size
    wanted = load_recipe(recipe, ["policy.lora.rank=1"])
    # A and B of 32 layers: inputs and outputs of q, k, v, o, gate, up and down
    adapters = 32 * (4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert node._checkpoint_bytes(wanted, recipe) == (wanted.checkpoint.keep + 1) * adapters * 14
    unknown = load_recipe(recipe, [f"policy.path={tmp_path}"])
    assert "no config.json in" in node._checkpoint_bytes(unknown, recipe)


def test_space_that_is_missing_fails_and_what_the_run_holds_counts(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    run = tmp_path / "run"
    assert output_space(run, free // 2).status == "ok"
    assert output_space(run, 2 * free).status == "failed"
    (run / "checkpoints/step_1").mkdir(parents=True)
    with open(run / "checkpoints/step_1/sparse", "wb") as file:
        file.truncate(2 * free)
    assert output_space(run, 2 * free).status == "ok"
    assert output_space(run, "no config.json").status == "skipped"


@pytest.mark.parametrize("free, status", [(64 * MIB, "failed"), (512 * MIB, "warning"), (GIB, "ok")])
def test_small_shared_memory_and_temporary_folders(free, status, monkeypatch):
    monkeypatch.setattr(node, "_free", lambda _: free)
    assert {node.node_space(name).status for name in ("temporary folder", "shared memory")} == {status}

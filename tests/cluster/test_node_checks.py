"""Checks of this node's disks, and what its mounts and network adapters are."""

import os
from pathlib import Path

import pytest

from megatron_scalerl.cluster import node
from megatron_scalerl.cluster.check import GIB, MIB, guarded
from megatron_scalerl.cluster.node import adapters, canary, fastest, mount_of, output_space, place_of
from megatron_scalerl.recipe.file import load_recipe

MOUNTS = """/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,vers=4.2,local_lock=none 0 0
mgs:/fs /home/with\\040space lustre rw,localflock 0 0
server:/old /home/old nfs rw,nolock,local_lock=all 0 0
tmpfs /home/old tmpfs rw 0 0
"""


def test_the_mount_of_a_path_is_the_deepest_and_newest(monkeypatch):
    monkeypatch.setattr(Path, "resolve", lambda path: path)
    kinds = {"/home": "nfs4", "/homes": "ext4", "/home/with space/x": "lustre", "/home/old/x": "tmpfs", "/x": "ext4"}
    assert {path: mount_of(Path(path), MOUNTS)[0] for path in kinds} == kinds
    assert mount_of(Path("/home/with space/x"), MOUNTS)[1] == "/home/with space"
    assert mount_of(Path("/x"), "") == ("unknown", "/")


def test_the_output_folder_is_tried_and_left_as_it_was(tmp_path):
    assert place_of(tmp_path / "runs" / "mine") == tmp_path
    check = canary(tmp_path)
    assert check.status == "ok" and check.found.startswith(f"{tmp_path}: 65,536 bytes written")
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written_or_locked_or_reads_otherwise_fails(tmp_path, monkeypatch):
    assert guarded("output folder", lambda: canary(Path("/proc"))).status == "failed"

    def unsupported(_):
        raise OSError(38, os.strerror(38))

    with monkeypatch.context() as patch:
        patch.setattr(node, "lock_file", unsupported)
        assert guarded("output folder", lambda: canary(tmp_path)).found == os.strerror(38)
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"other")
    assert canary(tmp_path).found == "other bytes"
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
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    with open(run / "checkpoints" / "step_1" / "sparse", "wb") as file:
        file.truncate(2 * free)
    assert output_space(run, 2 * free).status == "ok"
    assert output_space(run, "no config.json").status == "skipped"


@pytest.mark.parametrize(("free", "status"), [(64 * MIB, "failed"), (512 * MIB, "warning"), (GIB, "ok")])
def test_small_shared_memory_and_temporary_folders(free, status, monkeypatch):
    monkeypatch.setattr(node, "_free", lambda _: free)
    assert {node.node_space(name).status for name in ("temporary folder", "shared memory")} == {status}


def test_rdma_ports_are_found_and_the_fastest_named(tmp_path):
    """As the kernel shows two InfiniBand ports, one of RoCE for storage, and one that is down."""
    for adapter, state, network, rate in (
        ("mlx5_0", "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)"),
        ("mlx5_2", "1: DOWN", "InfiniBand", "400 Gb/sec (4X NDR)"),
        ("mlx5_bond_0", "4: ACTIVE", "Ethernet", "100 Gb/sec (4X EDR)"),
    ):
        port = tmp_path / adapter / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("link_layer", network), ("rate", rate)):
            (port / name).write_text(f"{text}\n")
    (tmp_path / "mlx5_3" / "ports" / "1").mkdir(parents=True)  # one that cannot be read
    found = adapters(tmp_path)
    assert found == {"mlx5_0:1": 400.0, "mlx5_1:1": 400.0, "mlx5_bond_0:1": 100.0}
    assert fastest(found) == "=mlx5_0:1,mlx5_1:1" and fastest({}) == ""

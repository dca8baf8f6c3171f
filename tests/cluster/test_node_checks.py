"""Checks of disks, shared memory and memory, each with a state that fails it."""

import os
import resource
from pathlib import Path

import pytest

from megatron_scalerl.cluster import host, output, space
from megatron_scalerl.cluster.check import GIB, MIB
from megatron_scalerl.cluster.host import adapters, fastest
from megatron_scalerl.cluster.mounts import mount_of
from megatron_scalerl.recipe.file import load_recipe

RECIPE = "recipes/scalerl_llama3_8b.yaml"


def recipe(*overrides):
    return load_recipe(RECIPE, overrides)


def by_name(checks):
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("devices", "limit", "status"),
    [
        ([], 64 * 1024, "ok"),
        (["mlx5_0"], 64 * 1024, "failed"),
        (["mlx5_0"], 2 * GIB, "warning"),
        (["mlx5_0"], resource.RLIM_INFINITY, "ok"),
    ],
)
def test_locked_memory_matters_where_there_is_rdma(devices, limit, status, tmp_path, monkeypatch):
    for name in devices:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(host, "RDMA", tmp_path)
    assert by_name(host.host_checks(None, None, gpus=0))["locked memory"].status == status


MOUNTS = """/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,vers=4.2,local_lock=none 0 0
mgs:/fs /home/with\\040space lustre rw,localflock 0 0
server:/old /home/old nfs rw,nolock,local_lock=all 0 0
tmpfs /home/old tmpfs rw 0 0
"""


def test_the_mount_of_a_path_is_the_deepest_and_newest(monkeypatch):
    monkeypatch.setattr(Path, "resolve", lambda path: path)
    kinds = {"/home": "nfs4", "/homes": "ext4", "/home/with space/x": "lustre", "/home/old/x": "tmpfs", "/x": "ext4"}
    assert {path: mount_of(Path(path), MOUNTS).kind for path in kinds} == kinds
    assert mount_of(Path("/home"), MOUNTS).local_locks == ""
    assert mount_of(Path("/home/with space"), MOUNTS).local_locks == "localflock"
    assert (
        mount_of(Path("/home/old"), MOUNTS.replace("tmpfs /home/old", "tmpfs /home/new")).local_locks
        == "local_lock=all"
    )
    assert mount_of(Path("/x"), "").kind == "unknown"


def test_the_output_folder_is_tried_and_left_as_it_was(tmp_path):
    checks = output.output_checks(tmp_path / "runs" / "mine")
    assert [check.name for check in checks] == [
        "output folder",
        "output folder: write and sync",
        "output folder: lock",
    ]
    assert {check.status for check in checks[1:]} == {"ok"} and f"{tmp_path}: " in checks[0].found
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written_fails():
    [check] = output.output_checks(Path("/proc/runs"))
    assert check.status == "failed" and check.found.startswith("/proc: ")


def test_locks_that_exclude_nobody_fail(tmp_path, monkeypatch):
    """As a file system without locks would have it."""
    assert output.lock_check(tmp_path).status == "ok"
    monkeypatch.setattr(output, "lock_file", lambda path: os.open(path, os.O_RDWR))
    check = output.lock_check(tmp_path)
    assert check.status == "failed" and check.found == "two at a time"

    def unsupported(_):
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(output, "lock_file", unsupported)
    check = output.lock_check(tmp_path)
    assert check.status == "failed" and check.found.startswith("ENOSYS")


def test_a_run_needs_its_checkpoints_and_one_more():
    """14 bytes for a parameter in bfloat16: 2 of weights, 4 of main weights, 8 of moments."""
    wanted = recipe("checkpoint.keep=2", "checkpoint.rollouts=keep", "steps=10")
    need = space.disk_need(wanted, 1_000_000)
    assert need.checkpoints == 3 * 14_000_000
    assert need.rollouts == 10 * 48 * 16 * 14336 * 8
    assert space.disk_need(recipe("checkpoint.rollouts=resume"), 1).rollouts == 0
    assert space.disk_need(recipe("policy.dtype=float32", "checkpoint.keep=1"), 100).checkpoints == 2 * 1200


def test_space_that_is_missing_fails_and_what_the_run_holds_counts(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize

    def check(checkpoints, rollouts=0):
        need = space.DiskNeed(checkpoints=checkpoints, rollouts=rollouts, assumed="assumed")
        return space.output_space(tmp_path, tmp_path / "run", need).status

    assert check(free // 2) == "ok"
    assert check(free // 2, free) == "warning"
    assert check(2 * free) == "failed"
    held = tmp_path / "run" / "checkpoints" / "step_1"
    held.mkdir(parents=True)
    with open(held / "sparse", "wb") as file:
        file.truncate(2 * free)
    assert check(2 * free) == "ok"
    assert space.output_space(tmp_path, tmp_path, "no config.json").status == "skipped"


def test_small_shared_memory_and_temporary_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "_free", lambda _: 32 * MIB)
    assert space.temporary_space(tmp_path).status == "failed"
    monkeypatch.setattr(space, "_free", lambda _: 512 * MIB)
    assert space.temporary_space(tmp_path).status == "warning"
    real = os.statvfs(tmp_path)
    for blocks, status in ((64, "failed"), (512, "warning"), (4096, "ok")):
        found = os.statvfs_result((MIB, MIB, blocks, blocks, blocks, *real[5:]))
        monkeypatch.setattr(space.os, "statvfs", lambda _, found=found: found)
        assert space.shared_memory(tmp_path).status == status


MEMINFO = f"MemTotal: 99 kB\nMemAvailable: {100 * 2**20} kB\n"


def test_memory_is_the_least_of_host_and_cgroups(tmp_path):
    job = tmp_path / "slurm" / "job_7"
    job.mkdir(parents=True)
    assert host.available_memory(MEMINFO, "0::/slurm/job_7\n", tmp_path) == 100 * GIB
    (tmp_path / "slurm" / "memory.max").write_text(f"{50 * GIB}\n")
    (tmp_path / "slurm" / "memory.current").write_text(f"{30 * GIB}\n")
    (job / "memory.max").write_text("max\n")
    (job / "memory.current").write_text("1\n")
    assert host.available_memory(MEMINFO, "0::/slurm/job_7\n", tmp_path) == 20 * GIB
    assert host.available_memory(MEMINFO, "4:memory:/slurm\n", tmp_path) == 100 * GIB


@pytest.mark.parametrize(("available", "status"), [(1 * GIB, "failed"), (4 * GIB, "warning"), (99 * GIB, "ok")])
def test_memory_against_what_the_processes_take(available, status, monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda *_: available)
    wanted = recipe("trainer.world_size=4", "engine.count=4", "rollouts.decoders=4")
    check = by_name(host.host_checks(wanted, 8_000_000_000, gpus=8))["memory"]
    assert check.status == status and "8 ranks and engines of 2.0 GiB" in check.found
    assert host.memory_need(wanted, 10**9, gpus=4).assumed.endswith("4 ranks and engines of 2.0 GiB")
    assert host.memory_need(wanted, 10**9, gpus=0).total > 8 * 16 * 10**9


def test_a_task_that_slurm_gave_one_processor_warns(monkeypatch):
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {0})
    wanted = recipe("trainer.world_size=4", "engine.count=4")
    assert by_name(host.host_checks(wanted, 1, gpus=8))["processors"].expected.startswith("9: one each")
    assert by_name(host.host_checks(None, None, gpus=0))["processors"].status == "ok"


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
    assert found["mlx5_bond_0:1"] == "Ethernet 100 Gb/sec (4X EDR)" and "mlx5_2:1" not in found and len(found) == 3
    assert fastest(found) == "=mlx5_0:1,mlx5_1:1" and fastest({}) == ""

"""CPUs and caches of ranks and engines."""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

import pytest

from megatron_scalerl.launch import own_share
from megatron_scalerl.launch.own_share import CACHES, near_devices, own_variables, share_of, shares_of
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.processes.parent_death import cpus_in


@pytest.fixture
def in_a_job(monkeypatch, tmp_path):
    """Variables of a job script."""
    monkeypatch.setenv("MSRL_LOCAL", str(tmp_path))
    monkeypatch.setenv("MSRL_BIND_CPUS", "1")
    for name in (*CACHES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_nodes_cores_are_divided_among_the_devices_that_they_are_near():
    one, two = ([(core, core + 32) for core in range(first, first + 9)] for first in (0, 16))
    near = [one, one, one, one, two, two, two, two]
    own = shares_of(near)
    assert own[0] == {0, 1, 32, 33} and own[7] == {22, 23, 24, 54, 55, 56}, "whole cores"
    assert sorted(cpu for each in own for cpu in each) == sorted(cpu for core in one + two for cpu in core)


@pytest.mark.parametrize(
    "near",
    [
        [[(0, 4), (1, 5), (2, 6)]] * 2,
        [[(0, 4), (1, 5)], [(2, 6)]],
        [[(0,), (1,), (2,), (3,)], [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]],
    ],
    ids=["one core for the first", "one core for the second", "near both and near one"],
)
def test_all_processes_are_bound_or_none(near):
    assert shares_of(near) == []


def test_why_nothing_is_bound_or_compiled_is_said_once(in_a_job, monkeypatch, caplog):
    monkeypatch.setattr(own_share, "near_devices", lambda count: [[(0,)]] * count)
    monkeypatch.setenv("MSRL_LOCAL", "/proc/nowhere/7")
    own_share._warn.cache_clear()
    assert [own_variables(name, "0/2") for name in ("trainer-0", "trainer-1")] == [{}, {}]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "nothing is compiled below MSRL_LOCAL",
        "no process is bound to CPUs",
    ]


def test_a_gpus_cpus_are_those_of_its_bus_address(monkeypatch, tmp_path):
    """NVML's functions are stand-ins; the files are as the kernel writes them."""
    cpus = sorted(os.sched_getaffinity(0))
    for address, local in (("0000:3b:00.0", str(cpus[0])), ("0000:af:00.0", f"{cpus[-1]},999")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(f"{local}\n")

    stand_in = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex={0: "AF", 1: "3B", 4: "3B", 5: "AF"}.__getitem__,
        nvmlDeviceGetPciInfo=lambda bus: SimpleNamespace(busId=f"00000000:{bus}:00.0"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setattr(own_share, "_PCI", tmp_path)
    monkeypatch.setattr(own_share, "_CPU", tmp_path)  # a core for each CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert near_devices(2) == [[(cpus[0],)], [(cpus[-1],)]]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert near_devices(2) == [[(cpus[-1],)], [(cpus[0],)]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert near_devices(2)[0] == near_devices(2)[1] and near_devices(1)[0] == [(cpu,) for cpu in cpus]


def test_a_child_takes_its_cpus_and_its_own_caches(in_a_job, tmp_path, monkeypatch):
    monkeypatch.setattr(own_share, "LEAST_CPUS", 1)
    monkeypatch.setattr(own_share, "_CPU", tmp_path)
    caches = f"{{name: os.environ[name] for name in {list(CACHES)}}}"
    found = f"[sorted(os.sched_getaffinity(0)), {caches}, 'MSRL_CPUS' in os.environ]"
    shown = f"import json, os; print(json.dumps({found}))"
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one CPU cannot be divided")

    async def started():
        env = {**os.environ, **own_variables("engine-1", share_of([1], 2))}
        child = await ChildProcess.start("engine-1", [sys.executable, "-c", shown], env, tmp_path / "log")
        return await child.wait()

    assert asyncio.run(started()) == 0
    cpus, caches, left = json.loads((tmp_path / "log").read_text())
    assert set(cpus) == shares_of(near_devices(2))[1] and 0 < len(cpus) < len(allowed) and not left
    assert caches == {name: f"{tmp_path}/engine-1/{folder}" for name, folder in CACHES.items()}


def test_what_the_site_sets_stays(in_a_job, monkeypatch):
    monkeypatch.setenv("MSRL_BIND_CPUS", "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/shared/vllm")
    assert set(own_variables("trainer-0", "0/1")) == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    monkeypatch.delenv("MSRL_LOCAL")
    assert own_variables("trainer-0", "") == {}


def test_nothing_is_compiled_where_another_user_can_write(in_a_job, monkeypatch, tmp_path):
    """Who writes to such a cache has code run by its reader."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("MSRL_LOCAL", str(tmp_path / "shared" / "job"))
    assert own_variables("engine-0", "") == {}
    (tmp_path / "shared").chmod(0o755)
    assert set(own_variables("engine-0", "")) == set(CACHES)
    monkeypatch.setenv("MSRL_LOCAL", "/proc/nowhere/job")
    assert own_variables("engine-0", "") == {}


def test_cpus_as_the_kernel_writes_them():
    assert cpus_in("0-1,4\n") == {0, 1, 4} and cpus_in("\n") == set()

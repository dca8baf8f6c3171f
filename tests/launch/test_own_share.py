"""CPUs and caches of ranks and engines."""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

import pytest

from megatron_scalerl.launch import own_share
from megatron_scalerl.launch.own_share import CACHES, cpus_of, near_devices, own_variables, share_of
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.processes.parent_death import cpus_in


@pytest.fixture
def in_a_job(monkeypatch, tmp_path):
    """Variables of a job script."""
    monkeypatch.setenv("MSRL_LOCAL", str(tmp_path))
    monkeypatch.setenv("MSRL_BIND_CPUS", "1")
    for name in (*CACHES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_nodes_cpus_are_divided_among_the_devices_that_they_are_near():
    one, two = range(8), range(8, 16)
    near = [one, one, one, one, two, two, two, two]
    own = [cpus_of([device], near) for device in range(8)]
    assert own[0] == {0, 1} and own[7] == {14, 15}
    assert sorted(cpu for each in own for cpu in each) == list(range(16)), "each once"
    assert cpus_of([2, 3], near) == {4, 5, 6, 7}
    assert cpus_of([0], [range(2)] * 3) == set(), "less than one CPU each: not bound"


def test_a_gpus_cpus_are_those_of_its_bus_address(monkeypatch, tmp_path):
    """NVML's functions are stand-ins; the files are as the kernel writes them."""
    cpus = sorted(os.sched_getaffinity(0))
    for address, local in (("0000:3b:00.0", str(cpus[0])), ("0000:af:00.0", f"{cpus[-1]},999")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(f"{local}\n")

    stand_in = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex={4: "3B", 5: "AF"}.__getitem__,
        nvmlDeviceGetPciInfo=lambda bus: SimpleNamespace(busId=f"00000000:{bus}:00.0"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setattr(own_share, "_PCI", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert near_devices(2) == [[cpus[0]], [cpus[-1]]]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert near_devices(2)[0] == near_devices(2)[1] and set(near_devices(1)[0]) == set(cpus)


def test_a_child_takes_its_cpus_and_its_own_caches(in_a_job, tmp_path):
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
    assert set(cpus) == cpus_of([1], near_devices(2)) and 0 < len(cpus) < len(allowed) and not left
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

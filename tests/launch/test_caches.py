"""Caches of ranks and engines for the code that they compile."""

import asyncio
import json
import os
import sys

import pytest

from megatron_scalerl.launch import caches
from megatron_scalerl.launch.caches import CACHES, cache_variables
from megatron_scalerl.processes.child_process import ChildProcess


@pytest.fixture(autouse=True)
def in_a_job(monkeypatch, tmp_path):
    """Variables of a job script."""
    monkeypatch.setenv("MSRL_LOCAL", str(tmp_path))
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)


def test_a_child_has_its_own_caches(tmp_path):
    found = f"{{name: os.environ[name] for name in {list(CACHES)}}}"
    shown = f"import json, os; print(json.dumps({found}))"

    async def started():
        env = {**os.environ, **cache_variables("engine-1")}
        child = await ChildProcess.start("engine-1", [sys.executable, "-c", shown], env, tmp_path / "log")
        return await child.wait()

    assert asyncio.run(started()) == 0
    folders = json.loads((tmp_path / "log").read_text())
    assert folders == {name: f"{tmp_path}/engine-1/{folder}" for name, folder in CACHES.items()}


def test_what_the_site_sets_stays(monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/shared/vllm")
    assert set(cache_variables("trainer-0")) == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    monkeypatch.delenv("MSRL_LOCAL")
    assert cache_variables("trainer-0") == {}


def test_nothing_is_compiled_where_another_user_can_write(monkeypatch, tmp_path, caplog):
    """Who writes to such a cache has code run by its reader."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("MSRL_LOCAL", str(tmp_path / "shared/job"))
    assert cache_variables("engine-0") == {}
    (tmp_path / "shared").chmod(0o755)
    assert set(cache_variables("engine-0")) == set(CACHES)
    monkeypatch.setenv("MSRL_LOCAL", "/proc/nowhere/job")
    caches._warn.cache_clear()
    caplog.clear()
    assert [cache_variables(name) for name in ("trainer-0", "trainer-1")] == [{}, {}]
    [said] = caplog.messages
    assert said.startswith("MSRL_LOCAL is not used for compiled code: "), "said once"

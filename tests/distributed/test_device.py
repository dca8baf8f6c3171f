"""Device selection on a machine without a GPU, and the environment of processes with one.

Why this matters: a wrong variable is silent on a GPU (memory fragments, runs are not deterministic). Not exercised:
a GPU; `tests/gpu` does.
"""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import printed
from random_policy import make_recipe

import megatron_scalerl
from megatron_scalerl.distributed import device
from megatron_scalerl.launch import trainer
from megatron_scalerl.launch.hosts import ONE_HOST
from megatron_scalerl.launch.placement import Attempt, Placement
from megatron_scalerl.trainer.ranks import environment


def test_without_a_gpu_the_seam_is_cpu_and_gloo():
    if device.HAVE_GPU:
        assert (device.device().type, device.backend()) == ("cuda", "nccl")
        return
    assert (device.device(), device.backend()) == (torch.device("cpu"), "gloo")
    assert not device.HAVE_TE


LAYERS = """
import importlib, os, torch
torch.cuda.is_available = lambda: True
from megatron_scalerl.distributed import device
for asked in ("", "plain", "te"):
    os.environ["MSRL_LAYERS"] = asked
    print(asked, importlib.reload(device).HAVE_TE)
"""


def test_transformer_engine_can_be_left_out(tmp_path):
    """The package is an empty stand-in: only its presence matters."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    paths = os.pathsep.join([str(tmp_path), str(Path(megatron_scalerl.__file__).parent.parent)])
    done = printed(sys.executable, "-c", LAYERS, PYTHONPATH=paths)
    assert done.split("\n")[:3] == [" True", "plain False", "te True"]


@pytest.mark.parametrize("asked", ["te", "TE"])
def test_unavailable_layers_are_refused_in_one_line(asked, monkeypatch):
    monkeypatch.setattr(device, "LAYERS", asked)
    monkeypatch.setattr(device, "_CAN_TE", False)
    with pytest.raises(ValueError, match=f"^MSRL_LAYERS: '{asked}' .* plain"):
        device.prepare(threads=1, deterministic=False)


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}


def recipe(**sections):
    return make_recipe(Path("policy"), **sections)


def two(kind):
    return {"trainer": {"world_size": 2}, "megatron": {"parallel": {f"{kind}_parallel_size": 2}}}


def test_a_rank_of_a_run_on_cpus_takes_no_gpu_of_its_host(monkeypatch):
    monkeypatch.setattr(device, "HAVE_GPU", False)
    assert environment(recipe(trainer={"deterministic": True})) == {"CUDA_VISIBLE_DEVICES": ""}
    assert environment(recipe(weights={"transport": "nccl"})) == EXPANDABLE


@pytest.mark.parametrize(
    "sections, expected",
    [
        ({}, EXPANDABLE),
        (two("tensor_model"), EXPANDABLE | ONE_CONNECTION),
        (two("context"), EXPANDABLE | ONE_CONNECTION),
        (two("pipeline_model"), EXPANDABLE),
        ({"megatron": {"ddp": {"nccl_ub": True}}}, {}),
        ({"trainer": {"deterministic": True}}, EXPANDABLE | DETERMINISTIC),
    ],
)
def test_the_environment_on_a_gpu(sections, expected, monkeypatch):
    monkeypatch.setattr(device, "HAVE_GPU", True)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert environment(recipe(**sections)) == expected


def test_the_allocators_newer_variable_is_the_users_choice(monkeypatch):
    monkeypatch.setattr(device, "HAVE_GPU", True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert environment(recipe()) == {}


def test_megatron_refuses_what_the_environment_avoids(monkeypatch):
    """NCCL's user buffers beside expandable segments: distributed_data_parallel_config.py, with torch before 2.11."""
    from megatron.core.distributed import DistributedDataParallelConfig, distributed_data_parallel_config

    monkeypatch.setattr(distributed_data_parallel_config, "is_torch_min_version", lambda _: False, raising=False)

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE["PYTORCH_CUDA_ALLOC_CONF"])
    with pytest.raises(ValueError, match="expandable_segments:True is currently not supported"):
        DistributedDataParallelConfig(nccl_ub=True)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_an_environment_that_breaks_determinism_is_refused(name, monkeypatch):
    for key, value in (DETERMINISTIC | {name: "1"}).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=rf"environment: {name} is 1; trainer.deterministic"):
        device._set_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_rank_is_started_with_the_environment_and_the_users_wins(monkeypatch, tmp_path):
    """The process is a stand-in that keeps what it would have been given."""
    seen = {}

    async def start(name, argv, env, log):
        seen.update(env)
        return SimpleNamespace(name=name, watch=asyncio.Event().wait)

    async def ready(timeout_s):
        pass

    monkeypatch.setattr(trainer.ChildProcess, "start", start)
    monkeypatch.setattr(trainer, "environment_of_ranks", lambda _: {"MSRL_TEST_A": "ours", "MSRL_TEST_B": "ours"})
    monkeypatch.setenv("MSRL_TEST_B", "the user's")
    joining = {"RANK": "0", "WORLD_SIZE": "2", "MSRL_SECRET": "secret"}
    client = SimpleNamespace(worker_env=lambda rank: joining, endpoint="tcp://127.0.0.1:1", wait_ready=ready)
    attempt = Attempt(run_id="r", incarnation="local.0", folder=tmp_path, recipe_file=tmp_path / "recipe.yaml")
    of_two = recipe(**two("tensor_model"))
    ranks = trainer.TrainerRanks(of_two, attempt, client, ONE_HOST, Placement.of(of_two, ONE_HOST))
    asyncio.run(ranks.start())
    assert (seen["MSRL_TEST_A"], seen["MSRL_TEST_B"], seen["MSRL_SECRET"]) == ("ours", "the user's", "secret")
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == ("1", "1", "2")


def test_patches_for_gpus_without_transformer_engine_are_those_of_no_device():
    from megatron_scalerl.distributed import cpu_compat

    cpu_compat.uninstall()
    before = torch.cuda.current_device
    try:
        cpu_compat.install_without_te()
        assert torch.cuda.current_device is before
        patched = {name for _, name, _ in cpu_compat._undo}
        assert patched == {
            "sharded_state_dict",
            "_set_main_param_and_optimizer_states",
            "load_state_dict",
            "te_general_gemm",
        }
    finally:
        cpu_compat.uninstall()


def test_plain_layers_on_a_gpu_never_reach_transformer_engines_product(monkeypatch):
    """It takes TF32 for the router's fp32 operands: 0.006 nats on an H200 (docs/gpu.md)."""
    from megatron.core.transformer.moe import moe_utils

    from megatron_scalerl.distributed import cpu_compat

    monkeypatch.setattr(moe_utils, "te_general_gemm", lambda *_, **__: pytest.fail("reached"))
    cpu_compat.uninstall()
    cpu_compat.install_without_te()
    try:
        states = torch.rand(3, 4, requires_grad=True)
        moe_utils.router_gating_linear(states, torch.rand(2, 4), None, torch.float32).sum().backward()
    finally:
        cpu_compat.uninstall()

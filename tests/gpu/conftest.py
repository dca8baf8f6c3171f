"""Where a check runs: at toy size on the CPU, some with `--all` alone; at full size on the GPU with `-m gpu`."""

import functools

import gpu_cases
import pytest
import torch
from distributed.runner import run_ranks

ON_GPU = pytest.mark.gpu


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=ON_GPU)])
def device(request):
    """ "cpu" or "gpu"."""
    return request.param


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(("cpu", "plain"), id="cpu"),
        pytest.param(("gpu", "plain"), id="gpu-plain", marks=ON_GPU),
        pytest.param(("gpu", "te"), id="gpu-te", marks=[ON_GPU, pytest.mark.te]),
    ],
)
def where(request):
    """(device, the trainer's layers)."""
    return request.param


@pytest.fixture(scope="session")
def ranks():
    """`run_ranks` on a device, by default of plain layers: each rank is a process, on a GPU of its own."""

    def run(count, target, *args, device, layers="plain", timeout_s=300.0):
        env = {"MSRL_LAYERS": layers} | ({} if device == "gpu" else {"CUDA_VISIBLE_DEVICES": ""})
        spawn = torch.accelerator.is_available()
        return run_ranks(count, target, *args, env=env, spawn=spawn, timeout_s=timeout_s)

    return run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """(family, device) -> its policy and what transformers computes with it; made once a session."""

    @functools.cache
    def make(kind, device):
        return gpu_cases.prepare(kind, device, tmp_path_factory.mktemp(kind))

    return make

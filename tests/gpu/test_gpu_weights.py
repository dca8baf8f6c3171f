"""The weight transport on each device: digests, packing, sending.

NCCL refuses two ranks on one GPU, unless each has a host id of its own (NCCL_HOSTID), so that it takes two GPUs to
receive something: the last check here, and the run in test_gpu_loop.py.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.weights.digest import digest, value_digest


@pytest.fixture
def place(device):
    return torch.device("cpu") if device == "cpu" else torch.accelerator.current_accelerator()


@pytest.mark.parametrize("size", [8, 8 << 20, (20 << 20) + 64])
def test_the_digest_of_bytes_is_the_cpus(size, place):
    """Less than a chunk, one chunk, several chunks (8 MiB each) with a remainder."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert digest(data.to(place)) == digest(data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_digest_of_values_is_the_cpus(dtype, place):
    values = torch.randn(300, 7, 500, generator=torch.Generator().manual_seed(1))
    part, along = values.to(dtype).transpose(0, 2), (range(500), range(7), range(300))
    assert value_digest(part.to(place), 1, (2, 1, 0), along) == value_digest(part, 1, (2, 1, 0), along)


@pytest.mark.slow
def test_the_same_weights_are_sent_thrice(ranks, device, record_property):
    """Rank 0 of a group of one: header, packing, digest, broadcast."""
    size = dict(matrices=2, width=256) if device == "cpu" else dict(matrices=64, width=4096)
    [(digests, rate)] = ranks(1, "gpu_ranks:send", *size.values(), device=device)
    record_property("GiB/s", rate)
    assert len(digests) == 1


STAYS_S = {"cpu": 1, "gpu": 150}
"""Over NCCL a watchdog would end a rank after 60 s, and its monitor after another 30 (the variable below)."""


@pytest.mark.slow
@pytest.mark.gpus(2)
def test_an_engine_that_is_gone_does_not_end_the_trainer(device):
    """It is killed in the middle of a broadcast. Its sender reports it, sends to the next engine, and lives on."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    environment |= {} if device == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}

    def start(role, rank, folder):
        command = [sys.executable, str(Path(__file__).with_name("gone_engine.py")), role, folder]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return subprocess.Popen(command, env=environment | {"LOCAL_RANK": str(rank)}, **pipes)

    with private_folder() as rendezvous:
        sides = [start("sender", 0, rendezvous.folder), start("gone", 1, rendezvous.folder)]
        try:
            sender, gone = sides
            assert sender.stdout.readline() == "failed\n" and gone.wait() == -signal.SIGKILL
            sides.append(start("next", 1, rendezvous.folder))
            assert sender.stdout.readline() == "sent\n" and sides[-1].wait() == 0
            with pytest.raises(subprocess.TimeoutExpired):
                sender.wait(STAYS_S[device])
            sender.stdin.write("\n")
            sender.stdin.close()
            assert sender.wait() == 0
        finally:
            for side in sides:
                side.kill()
                side.wait()

"""Who may join a run: real worker processes against a real client, refused before they load anything."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from megatron_scalerl.trainer import worker
from megatron_scalerl.trainer.client import TrainerClient, TrainerError

pytestmark = pytest.mark.slow

WORKER = [sys.executable, "-m", "megatron_scalerl.trainer.worker"]


def client(world_size=1) -> TrainerClient:
    return TrainerClient(world_size=world_size, run_id="run", incarnation="1.0", secret="a secret")


def environment(trainer: TrainerClient, **changes) -> dict[str, str]:
    return {**os.environ, **trainer.worker_env(0), "MSRL_RECIPE": "nowhere.yaml", "OMP_NUM_THREADS": "1", **changes}


async def outcome(trainer: TrainerClient, env: dict[str, str], *, fails: bool) -> tuple[int, str, str]:
    """Exit status and last line of a worker, and the error of the client, which `fails` or goes on waiting."""
    process = await asyncio.create_subprocess_exec(*WORKER, env=env, stderr=subprocess.PIPE)
    waiting = asyncio.create_task(trainer.wait_ready(timeout_s=120))
    _, errors = await process.communicate()
    if not fails:
        waiting.cancel()
    [failure] = await asyncio.gather(waiting, return_exceptions=True)
    trainer.close()
    assert process.returncode is not None
    return process.returncode, errors.decode().strip().splitlines()[-1], str(failure)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"MSRL_RUN_ID": "other"}, "run id: expected run, found other"),
        ({"MSRL_INCARNATION": "1.1"}, "incarnation: expected 1.0, found 1.1"),
        ({"WORLD_SIZE": "2"}, "world size: expected 1, found 2"),
        ({"RANK": "1"}, "rank: expected 0 to 0, found 1"),
    ],
)
def test_strangers_are_refused_with_a_reason(changes, reason):
    async def scenario():
        trainer = client()
        return await outcome(trainer, environment(trainer, **changes), fails=False)

    status, line, failure = asyncio.run(scenario())
    assert status == worker.EXIT_REFUSED
    assert line.endswith(reason)
    assert failure == ""  # the client goes on waiting for its own


def test_a_wrong_secret_gets_no_answer():
    async def scenario():
        trainer = client()
        env = environment(trainer, MSRL_SECRET="another secret", MSRL_GREETING_TIMEOUT_S="3")
        return await outcome(trainer, env, fails=False)

    status, line, failure = asyncio.run(scenario())
    assert status == worker.EXIT_REFUSED
    assert "found none (gone, or MSRL_SECRET is another run's)" in line
    assert failure == ""


def test_an_exception_reaches_the_client_with_its_rank():
    async def scenario():
        trainer = client()
        return await outcome(trainer, environment(trainer), fails=True)

    status, line, failure = asyncio.run(scenario())
    assert status == 1
    assert line.endswith("nowhere.yaml: expected a recipe file, found nothing")
    assert failure.startswith("trainer rank 0: ")
    assert failure.endswith("nowhere.yaml: expected a recipe file, found nothing")


def test_nobody_came():
    async def scenario():
        trainer = client(world_size=2)
        with pytest.raises(TrainerError, match=r"trainer rank 0, 1: no answer to a start within 0.05 s"):
            await trainer.wait_ready(timeout_s=0.05)
        trainer.close()

    asyncio.run(scenario())


def test_missing_settings_are_named():
    with pytest.raises(ValueError, match="missing MSRL_SECRET"):
        worker.WorkerSettings.from_environment({name: "1" for name in worker._VARIABLES if name != "MSRL_SECRET"})

"""Trainer ranks on two other hosts, which are this one: started by a command, none of them left behind."""

import contextlib
import os
import signal

import open_doors
import psutil
import pytest
from launch.other_hosts import none_left
from random_policies import write_policy
from random_policy import make_recipe

from megatron_scalerl.launch.control_folder import secret_file
from megatron_scalerl.launch.hosts import hosts_of
from megatron_scalerl.launch.placement import Attempt, Placement
from megatron_scalerl.launch.trainer import trainer_ranks
from megatron_scalerl.processes.child_process import ProcessDied
from megatron_scalerl.processes.secret_file import write_secret
from megatron_scalerl.recipe.file import dump_recipe
from megatron_scalerl.trainer.client import TrainerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECRET = "the secret of this run"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy") / "llama")


@contextlib.asynccontextmanager
async def started(policy, folder, names="one,two,three", slots=1):
    """A trainer of two ranks with its client, and the processes that the command started."""
    recipe = make_recipe(policy, trainer={"world_size": 2}, engine={"count": 1})
    file = folder / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    hosts = hosts_of(names, slots=slots, run_on="env STAND_IN_HOST={host} sh -c", address="127.0.0.1")
    write_secret(secret_file(folder), SECRET)
    attempt = Attempt(run_id="run", incarnation="local.0", folder=folder, recipe_file=file)
    async with trainer_ranks(recipe, attempt, SECRET, hosts, Placement.of(recipe, hosts)) as trainer:
        info = await trainer.start()
        assert info.dp_size == 2
        yield trainer


def programs(trainer):
    """What runs below this process for a trainer: host programs and ranks."""
    mine = f"MSRL_CONTROLLER={trainer.client.endpoint}"
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words = " ".join(child.cmdline())
            if mine in words or child.environ().get("MSRL_CONTROLLER") == trainer.client.endpoint:
                found.append(child)
    return found


def ranks_of(processes):
    return [each for each in processes if "megatron_scalerl.trainer.worker" in each.cmdline()]


async def test_they_meet_at_rank_0s_store_and_end_with_the_run(policy, tmp_path, monkeypatch):
    """With what CUDA needs in their environment, which the controller decides: a GPU's, which is not here."""
    needed = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setattr("megatron_scalerl.launch.trainer.environment_of_ranks", lambda recipe: needed)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    async with started(policy, tmp_path) as trainer:
        running = programs(trainer)
        assert len(ranks_of(running)) == 2
        for rank in ranks_of(running):
            given = {name: rank.environ().get(name) for name in needed}
            assert given == needed | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "the user's own value"
        assert trainer.client.rendezvous.host == "127.0.0.1"
        assert await trainer.client.manifest()
        lines = [" ".join(each.cmdline()) for each in running]
        assert [line for line in lines if SECRET in line] == []
        outside = [each for each in running if each not in ranks_of(running)]
        assert [each for each in outside if SECRET in str(each.environ())] == []
        assert open_doors.leaks([os.getpid(), *(each.pid for each in running)], SECRET) == []
    await none_left(running)
    assert "STAND_IN_HOST" not in (tmp_path / "logs/trainer-1.log").read_text()


async def test_a_rank_that_dies_is_named_and_ends_the_others(policy, tmp_path):
    with pytest.raises(TrainerError):
        async with started(policy, tmp_path) as trainer:
            running = programs(trainer)
            ranks_of(running)[1].kill()
            with pytest.raises(ProcessDied, match=r"(?s)trainer-(one|two) exited with code 1;.*trainer-[01] exited"):
                await trainer.watch()
            raise TrainerError("as the launcher does then")


async def test_the_rank_that_died_is_named_and_not_one_that_its_host_ends_then(policy, tmp_path):
    with pytest.raises(TrainerError, match="as the launcher does then"):
        async with started(policy, tmp_path, "one,two", slots=2) as trainer:
            victim = next(each for each in programs(trainer) if each.environ().get("RANK") == "1")
            victim.kill()
            with pytest.raises(TrainerError, match=r"^trainer rank 1: the process exited unexpectedly"):
                await trainer.client.manifest()
            raise TrainerError("as the launcher does then")


@pytest.mark.parametrize("victim", ["agent", pytest.param("controller", marks=pytest.mark.full)])
async def test_ranks_end_with_what_started_them(policy, tmp_path, victim):
    with contextlib.suppress(TrainerError):
        async with started(policy, tmp_path) as trainer:
            running = programs(trainer)
            if victim == "controller":
                trainer.client.close()  # as its death does
            else:
                for each in [each for each in running if "megatron_scalerl.launch.agent" in each.cmdline()]:
                    os.kill(each.pid, signal.SIGKILL)
            await none_left(running)
            raise TrainerError("as the launcher does then")

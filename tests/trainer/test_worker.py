"""Trainer ranks as processes, driven by the client: every command, every way to fail."""

import asyncio
import contextlib
import gzip
import json
import os
import signal
import sys
from pathlib import Path

import open_doors
import psutil
import pytest
import torch
from random_policies import of_targets
from random_policy import make_recipe, of_rollouts, plan_of, random_samples, train
from transformers import AutoModelForCausalLM
from waiting import passes, until

from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.distributed.sockets import EXIT_ORPHAN
from megatron_scalerl.recipe.file import dump_recipe
from megatron_scalerl.trainer.client import TrainerClient, TrainerError
from megatron_scalerl.weights.digest import combine
from megatron_scalerl.weights.plan import Connection, all_of
from megatron_scalerl.weights.transport.frames import assembled_tensors, receive
from megatron_scalerl.weights.transport.gloo import Group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 300
SECRET = "the secret of the run"


class World:
    """A client and the processes of its ranks. `megatron` is the recipe's section."""

    def __init__(self, folder, policy, *, world_size, megatron=None):
        self._resources = contextlib.ExitStack()
        self.client = TrainerClient(
            world_size=world_size,
            run_id="run",
            incarnation="1.0",
            secret=SECRET,
            rendezvous=self._resources.enter_context(private_folder()),
            command_timeout_s=240,
        )
        self._recipe = folder / "recipe.yaml"
        sections = {"trainer": {"world_size": world_size}, "weights": {"max_senders": 2}}
        sections["telemetry"] = {"profile_steps": [2]}
        self._recipe.write_text(dump_recipe(make_recipe(policy, megatron=megatron or {}, **sections)))
        self.processes = []

    async def start(self):
        """Start every rank, and wait."""
        for rank in range(self.client.world_size):
            env = {**os.environ, **self.client.worker_env(rank), "MSRL_RECIPE": str(self._recipe)}
            env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "nowhere0"}  # the ranks choose for themselves
            self.processes.append(
                await asyncio.create_subprocess_exec(sys.executable, "-m", "megatron_scalerl.trainer.worker", env=env)
            )
        return await self.client.wait_ready(START_S)

    async def exits(self):
        """Exit status of every rank."""
        return [await asyncio.wait_for(p.wait(), 240) for p in self.processes]

    def pids(self):
        """Processes of the ranks."""
        return [process.pid for process in self.processes]

    def end(self):
        self.client.close()
        self._resources.close()
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


async def receive_weights(client, version):
    """What an engine would get: the tensors by name, once the sender's report agrees with them."""
    connection = Connection(
        backend="gloo",
        rendezvous=client.rendezvous,
        group="weights-1",
        world_sizes=(2,),
        bucket_mib=1,
        connect_timeout_s=240,
        timeout_s=240,
    )
    plan, digests = await client.plan_weights((all_of(await client.manifest()),)), []

    def join():
        return {sender: Group(connection, 1, sender) for sender in range(plan.senders)}

    _, groups = await asyncio.gather(client.connect_weights(connection), asyncio.to_thread(join))

    def collect():
        return {
            name: tensor.clone() for name, tensor in assembled_tensors(receive(groups, plan, version, digests), plan)
        }

    report, tensors = await asyncio.gather(client.send_weights(version), asyncio.to_thread(collect))
    assert report.digests == (combine(digests),) and report.bytes > 0
    return tensors, groups


async def step_with_the_next_batch_ahead(client, samples, following, *, step):
    """The report of a step beside which the batch of the next one is sent, and a function that then makes this."""
    await client.prepare(plan_of(samples, step=step, dp_size=2), of_rollouts([s.rollout for s in samples]))
    ahead = plan_of(following, step=step + 1, dp_size=2), of_rollouts([s.rollout for s in following])
    report, _ = await asyncio.gather(client.step(step), client.prepare(*ahead))
    return report, lambda: client.step(step + 1)


def check_doors(world):
    """With the trainer's groups and a weight group open: who could come in, and where the secret shows."""
    doors = open_doors.listening([os.getpid(), *world.pids()])
    assert len(doors) > 2 and [door for door in doors if not door.loopback] == []
    assert open_doors.stores(doors) == {}
    assert open_doors.leaks([os.getpid(), *world.pids()], SECRET) == []
    folder = Path(world.client.rendezvous.folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == {"trainer", "weights-1-0-0", "weights-1-1-0"} and all(files.values())
    assert [name for name, content in files.items() if SECRET.encode() in content] == []
    assert folder.stat().st_mode & 0o777 == 0o700


def run(scenario, *arguments, **keywords):
    """The scenario's coroutine with a world that is closed afterwards."""

    async def whole():
        world = World(*arguments, **keywords)
        try:
            return await scenario(world)
        finally:
            world.end()

    return asyncio.run(whole())


def check_profiles(folder):
    """Of the one step that the recipe names: each rank's phases and products, in Chrome's format."""
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    [step] = folder.iterdir()
    assert sorted(path.name for path in step.iterdir()) == [f"rank_{rank}.json.gz" for rank in range(2)]
    for path in step.iterdir():
        names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"forward and backward", "optimizer", "aten::mm"} <= names


def test_two_ranks_carry_out_every_command(tmp_path, policy):
    samples = [random_samples(n) for n in (1, 2, 3)]
    probe = [[5, 6, 7, 8], [9, 10, 11]]

    async def scenario(world):
        info = await world.start()
        assert (info.dp_size, info.backend, info.logits, info.device) == (2, "gloo", "fp32", "cpu")
        expected = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(policy).parameters())
        assert info.parameters == expected
        first, *_ = await world.client.manifest()
        assert first.name == "model.embed_tokens.weight" and first.shape == (64, 32)
        reports = []
        for step in (1, 2):
            reports.append(await train(world.client, samples[step - 1], step=step, dp_size=2))
        assert [(r.step, r.policy_version) for r in reports] == [(1, 1), (2, 2)]
        assert reports[0].tokens == sum(len(s.prompt_token_ids) + len(s.rollout.token_ids) for s in samples[0])
        await world.client.save(tmp_path / "step_000002", {"batches": 2})
        third = await train(world.client, samples[2], step=3, dp_size=2)
        scores = await world.client.logprobs(probe)
        assert await world.client.load(tmp_path / "step_000002") == {"batches": 2}
        again, make_fourth = await step_with_the_next_batch_ahead(world.client, samples[2], samples[0], step=3)
        assert (again.loss, again.grad_norm) == (third.loss, third.grad_norm)
        assert await world.client.logprobs(probe) == scores
        await world.client.save(tmp_path / "step_000003", {}, asynchronous=True)
        sent, groups = await receive_weights(world.client, version=3)
        check_doors(world)
        for group in groups.values():
            group.close()
        fourth = await make_fourth()
        assert await world.client.finish_save(wait=True) > 0
        await world.client.load(tmp_path / "step_000003")
        expected = await train(world.client, samples[0], step=4, dp_size=2)
        assert (fourth.loss, fourth.grad_norm) == (expected.loss, expected.grad_norm)
        await world.client.stop()
        assert await world.exits() == [0, 0]
        return scores, sent

    scores, sent = run(scenario, tmp_path, policy, world_size=2)
    check_profiles(tmp_path / "profile")
    to_hf(tmp_path / "step_000003", tmp_path / "exported", like=policy)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    exported = model.state_dict()
    assert sent.keys() == exported.keys() and all(torch.equal(w, exported[n]) for n, w in sent.items())
    for ids, found in zip(probe, scores, strict=True):
        expected = of_targets(model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]))
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=5e-5)


def test_a_rank_killed_in_a_step_is_named_and_the_others_exit_with_their_controller(tmp_path, policy, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.trainer.client.BLAME_S", 60.0)

    async def scenario(world):
        await world.start()
        assert {door.host for door in open_doors.listening(world.pids())} == {"127.0.0.1"}
        samples = random_samples(1, count=400)
        await world.client.prepare(plan_of(samples, dp_size=2), of_rollouts([s.rollout for s in samples]))
        stepping = asyncio.create_task(world.client.step(1))
        await passes(1)  # the commands are on their way
        world.processes[1].send_signal(signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"trainer rank 1: the process exited unexpectedly"):
            await stepping
        world.client.close()
        return await world.exits()

    survivor, killed = run(scenario, tmp_path, policy, world_size=2)
    assert killed == -signal.SIGKILL
    # It may notice first that its controller or that its peer has exited.
    assert survivor in (EXIT_ORPHAN, 1)


TP2 = {"parallel": {"tensor_model_parallel_size": 2}, "model": {"sequence_parallel": True}}


def damaged(samples, step):
    """A plan, and a store that returns one completion with a wrong first byte."""
    whole = of_rollouts([sample.rollout for sample in samples])

    async def read(numbers):
        first, *others = await whole(numbers)
        return [b"\x09" + first[1:], *others]

    return plan_of(samples, step=step), read


def test_a_damaged_batch_names_the_rank_that_received_it_and_ends_its_peer_too(tmp_path, policy):
    async def scenario(world):
        info = await world.start()
        assert info.dp_size == 1
        assert (await train(world.client, random_samples(1))).policy_version == 1  # the peer has it from rank 0
        await world.client.prepare(*damaged(random_samples(2), step=2))
        with pytest.raises(TrainerError) as caught:
            await world.client.step(2)
        await asyncio.wait_for(world.processes[0].wait(), 60)
        world.client.close()
        return str(caught.value), await world.exits()

    error, exits = run(scenario, tmp_path, policy, world_size=2, megatron=TP2)
    assert error.startswith("trainer rank 0: ") and "\n" not in error
    assert "batch of step 2: completion 0: rollout: format 9 " in error
    assert exits[0] == 1 and exits[1] in (EXIT_ORPHAN, 1)


def test_a_rank_that_dies_before_it_shares_its_batch_is_named_and_its_peer_does_not_hang(
    tmp_path, policy, monkeypatch
):
    monkeypatch.setattr("megatron_scalerl.trainer.client.BLAME_S", 60.0)

    async def scenario(world):
        await world.start()
        holder = world.processes[0]
        holder.send_signal(signal.SIGSTOP)
        switches = psutil.Process(world.processes[1].pid).num_ctx_switches
        calls, before = world.client._calls, switches().voluntary
        stepping = asyncio.create_task(train(world.client, random_samples(1)))
        await until(lambda: world.client._calls > calls and world.client._step_sent.is_set())
        await until(lambda: switches().voluntary > before)  # the peer waits in the broadcast
        holder.send_signal(signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"^trainer rank 0: the process exited unexpectedly"):
            await stepping
        world.client.close()
        return await world.exits()

    killed, peer = run(scenario, tmp_path, policy, world_size=2, megatron=TP2)
    assert killed == -signal.SIGKILL and peer in (EXIT_ORPHAN, 1)


def test_no_orphan_outlives_its_controller(tmp_path, policy):
    async def scenario(world):
        await world.start()
        world.client.close()
        return await world.exits()

    assert run(scenario, tmp_path, policy, world_size=1) == [EXIT_ORPHAN]

"""A real vLLM server behind an agent at another address: TLS, what is killed, and an engine that joins meanwhile."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine.engine_recipes import recipe_for
from launch.other_hosts import agents, engines_of, none_left, with_children
from launch.stand_ins import environment

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.engine.membership import EngineState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [1, 30, 31, 32]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from engine import tiny_policies

    return tiny_policies.make(tmp_path_factory.mktemp("policy") / "dense", "dense", 0)


async def generate(client, tokens=20):
    return await client.generate(PROMPT, sampling=SamplingSpec(max_tokens=tokens, seed=3, ignore_eos=True))


async def refusals(client):
    """What the server answers to whoever does not trust its certificate, speaks plain HTTP or has no secret."""
    for url, tls in ((client.url, None), (client.url.replace("https", "http"), None)):
        async with EngineClient(url=url, secret=client.secret, tls=tls) as stranger:
            with pytest.raises(EngineError):
                await stranger.progress()
    async with EngineClient(url=client.url, secret="another", tls=client._tls) as stranger:
        with pytest.raises(EngineError, match="401 the run's secret is missing or wrong"):
            await stranger.progress()


def test_an_engine_on_another_host_and_one_that_joins_it(policy, tmp_path, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    changes = []

    async def scenario():
        async with engines_of(recipe_for(policy), tmp_path, changes.append) as engines:
            members = engines.members
            [client] = members.stale
            assert client.url.startswith("https://127.0.0.2:")
            await refusals(client)
            [key] = [word for word in with_children(agents(tmp_path)["engine-0"])[1].cmdline() if "key.pem" in word]
            assert not Path(key).parent.exists(), "the key is deleted once the server has read it"
            alone = await generate(client)
            argv = [sys.executable, "-m", "megatron_scalerl", "engine", "--join", str(tmp_path)]
            joined = subprocess.Popen(argv, env={**os.environ, "MSRL_BIND_HOST": "127.0.0.3", "SLURM_JOB_ID": "9"})
            try:
                while len(members.stale) < 2:
                    assert (await generate(client)).token_ids == alone.token_ids
                other = members.stale[1]
                assert (other.name, other.url[:17]) == ("extra-9-0", "https://127.0.0.3")
                assert (await generate(other)).token_ids == alone.token_ids
                extra = with_children(agents(tmp_path)["extra-9-0"])
                assert len(extra) >= 2
                extra[0].kill()
                await none_left(extra)
                joined.terminate()
                await members.until(lambda: members.members[1].state is EngineState.LOST)
            finally:
                joined.kill()
                joined.wait()
            await the_server_is_killed(members)
            left = with_children(agents(tmp_path)["engine-0"])
            engines._agents.close()  # as the end of the controller does
            await none_left(left)

    async def the_server_is_killed(members):
        answer = asyncio.create_task(generate(members.stale[0], 1900))
        await generate(members.stale[0])
        agent, server, *_ = with_children(agents(tmp_path)["engine-0"])
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            await answer
        await members.until(lambda: members.members[0].restarts == 1 and bool(members.stale))
        await none_left([agent, server])
        assert (await generate(members.stale[0])).token_ids

    asyncio.run(asyncio.wait_for(scenario(), 500))
    reasons = [change.reason for change in changes if change.state is EngineState.DRAINING]
    assert reasons[1:] == ["engine-0 (host b) exited with code -9"]
    log = Path(tmp_path, "logs", "engine-0.log").read_text()
    assert re.search(r"INFO +engine-0 vllm\.", log) and "accepted by the controller" in log

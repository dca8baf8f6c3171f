"""A real vLLM server behind an agent at another address: TLS, what is killed, and an engine that joins meanwhile."""

import re
from pathlib import Path

import pytest
from engine.engine_recipes import recipe_for
from launch.other_hosts import agents, engines_of, none_left, with_children
from launch.stand_ins import environment

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.engine.watchdog import EngineDied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [1, 30, 31, 32]
NO_RESTART = {"vllm": {"max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}, "max_restarts": 0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from engine import tiny_policies

    return tiny_policies.make(tmp_path_factory.mktemp("policy") / "dense", "dense", 0)


async def generate(client):
    return await client.generate(PROMPT, sampling=SamplingSpec(max_tokens=20, seed=3, ignore_eos=True))


async def refusals(client):
    """What the server answers to whoever does not trust its certificate, speaks plain HTTP or has no secret."""
    for url, tls in ((client.url, None), (client.url.replace("https", "http"), None)):
        async with EngineClient(url=url, secret=client.secret, tls=tls) as stranger:
            with pytest.raises(EngineError):
                await stranger.progress()
    async with EngineClient(url=client.url, secret="another", tls=client._tls) as stranger:
        with pytest.raises(EngineError, match="401 the run's secret is missing or wrong"):
            await stranger.progress()


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


async def test_a_server_behind_an_agent_speaks_tls_and_dies_with_it(policy, tmp_path):
    async with engines_of(recipe_for(policy, engine=NO_RESTART), tmp_path) as engines:
        [client] = engines.members.stale
        assert client.url.startswith("https://127.0.0.2:")
        await refusals(client)
        assert len((await generate(client)).token_ids) == 20
        processes = with_children(agents(tmp_path)["engine-0"])
        [key] = [word for word in processes[1].cmdline() if "keyfile.pem" in word]
        assert not Path(key).parent.exists(), "the key is deleted once the server has read it"
        processes[0].kill()
        await none_left(processes)
        with pytest.raises(EngineDied, match=r"engine\.min_engines: 0 .* \(engine-0: engine-0 \(host b\) lost "):
            await engines.watch()
    server, agent = (Path(tmp_path, "logs", f"{name}-0.log").read_text() for name in ("engine", "agent"))
    assert re.search(r"INFO +engine-0 vllm\.", server) and "accepted by the controller" in agent

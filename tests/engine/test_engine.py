"""One real vLLM server: sampling, forced tokens, and the secret."""

import asyncio
import dataclasses
import json
import os
import re
import signal

import aiohttp
import psutil
import pytest
import server_insight
import tiny_policies
from engine_recipes import SECRET, recipe_for
from tiny_policies import ENDS, EOS, HOSTILE, PHRASE, THINK_END, error_of

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import SECRET_HEADER, SamplingSpec
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.engine.numerics import check_engine
from megatron_scalerl.engine.watchdog import EngineDied
from megatron_scalerl.launch.process import EngineProcess
from megatron_scalerl.types import CompletionLost

pytestmark = pytest.mark.slow

PROMPT = [1, 30, 31, 32]


def plan(**changes):
    defaults = {"cut": 20, "phrase_ids": PHRASE, "think_end_ids": THINK_END, "answer_budget": 8, "eos_id": EOS}
    return Plan(**defaults | changes)


def interrupted(seed=0, **changes):
    return SamplingSpec(max_tokens=2000, seed=seed, interruption=plan(**changes))


def free(seed=0, tokens=40):
    return SamplingSpec(max_tokens=tokens, seed=seed, ignore_eos=True)


def asked(engine, *settings):
    """A completion of the prompt with the settings of `free`."""
    return engine.client.generate(PROMPT, sampling=free(*settings))


def test_raw_logprobs_equal_log_softmax_and_seeds_decide(engine, policies, run):
    async def scenario():
        return await asyncio.gather(*(asked(engine, s) for s in (0, 0, 1)))

    first, same, other = run(scenario())
    assert first.token_ids == same.token_ids != other.token_ids
    assert error_of(tiny_policies.load(policies["dense_a"]), PROMPT, first) <= 1e-4
    assert first.loss_mask == (True,) * 40 and first.truncated and not first.interrupted
    assert first.policy_versions == (0,) * 40 and first.thinking_cut == 0


def test_its_log_has_the_format_of_every_process_and_not_the_secret(engine):
    text = engine.server.log_path.read_text()
    assert re.search(r"^(\(\w+ pid=\d+\) )?[\d-]+ [\d:,]+ INFO +engine-0 vllm\.[\w.]+: ", text, re.MULTILINE), text
    assert SECRET not in text


def test_the_policys_generation_config_changes_no_probability(engine, policies, run):
    """vLLM uses its top_k, top_p, min_p, penalty and temperature for requests that do not set them."""

    async def scenario():
        return await asyncio.gather(*(asked(engine, s, 60) for s in range(16)))

    model = tiny_policies.load(policies["dense_a"])
    outside, expected = 0, 0.0
    for rollout in run(scenario()):
        assert len(rollout.token_ids) == 60 > HOSTILE["max_new_tokens"]
        assert error_of(model, PROMPT, rollout) <= 1e-4
        rows = tiny_policies.logprobs(model, PROMPT, list(rollout.token_ids))
        top = rows.topk(HOSTILE["top_k"])
        expected += (1 - top.values.exp().sum(-1)).sum().item()
        outside += sum(token not in best for token, best in zip(rollout.token_ids, top.indices.tolist()))
    # as many as the whole distribution says: binomial, 4 standard deviations
    assert expected > 50 and abs(outside - expected) < 4 * expected**0.5


def test_every_token_that_the_policy_ends_with_ends_a_completion(engine, policies, run):
    """Also one that is only in generation_config.json: it was sampled, so it is kept and part of the loss."""

    def sampling(seed):
        return SamplingSpec(max_tokens=300, seed=seed, end_ids=ENDS, interruption=plan(cut=300) if seed % 2 else None)

    async def scenario():
        return await asyncio.gather(*(engine.client.generate(PROMPT, sampling=sampling(s)) for s in range(24)))

    model, last = tiny_policies.load(policies["dense_a"]), set()
    for rollout in run(scenario()):
        if not rollout.truncated and not rollout.interrupted:
            assert rollout.token_ids[-1] in ENDS and not set(rollout.token_ids[:-1]) & set(ENDS)
            assert all(rollout.loss_mask) and error_of(model, PROMPT, rollout) <= 1e-4
            last.add(rollout.token_ids[-1])
    assert last == set(ENDS)


def test_scores_of_given_tokens(engine, policies, run):
    tokens = PROMPT + [40, 41, 42]
    found = run(engine.client.score(tokens))
    expected = tiny_policies.logprobs(tiny_policies.load(policies["dense_a"]), tokens[:1], tokens[1:])
    assert len(found) == 6
    assert max(abs(expected[i, t].item() - found[i]) for i, t in enumerate(tokens[1:])) <= 1e-4


def test_the_phrase_is_forced_at_the_cut_in_many_requests(engine, policies, run):
    """Rows are added, removed and moved in the batch, and the KV cache is discarded twice meanwhile."""
    cuts = [3 + 7 * i for i in range(24)]

    async def scenario():
        tasks = [
            asyncio.create_task(engine.client.generate([*PROMPT, 50 + i], sampling=interrupted(i, cut=cut)))
            for i, cut in enumerate(cuts)
        ]
        for landmark in (2, 8):
            await tasks[landmark]
            await engine.client.pause(clear_cache=True)
            await engine.client.resume()
        return await asyncio.gather(*tasks)

    model = tiny_policies.load(policies["dense_a"])
    for i, (cut, rollout) in enumerate(zip(cuts, run(scenario()))):
        assert rollout.thinking_cut == cut
        if set(ENDS) & set(rollout.token_ids[:cut]):  # ended before thinking did
            assert not rollout.interrupted and not rollout.truncated
            continue
        end = cut + len(PHRASE)
        assert rollout.interrupted and rollout.token_ids[cut:end] == PHRASE
        assert rollout.loss_mask == (True,) * cut + (False,) * len(PHRASE) + (True,) * (len(rollout.token_ids) - end)
        assert rollout.rollout_logprobs[cut:end] == (0.0,) * len(PHRASE)
        answer = rollout.token_ids[end:]
        assert len(answer) == 8 if rollout.truncated else answer[-1] in ENDS
        assert not set(ENDS) & set(answer if rollout.truncated else answer[:-1])
        assert error_of(model, [*PROMPT, 50 + i], rollout) <= 1e-4


def test_a_natural_end_never_gets_the_phrase(engine, run):
    """The closing tag is set to tokens that this seed samples anyway; the answer continues far past the cut."""

    async def scenario():
        many = await asyncio.gather(*(asked(engine, s, 60) for s in range(12)))
        seed, sampled = next((r.seed, r.token_ids) for r in many if not set(ENDS) & set(r.token_ids))
        tag = sampled[10:12]
        changes = {"think_end_ids": tag, "phrase_ids": (20, 21, *tag), "answer_budget": 40}
        cuts = {cut: interrupted(seed, cut=cut, **changes) for cut in (20, 12, 11)}
        return sampled, {cut: await engine.client.generate(PROMPT, sampling=s) for cut, s in cuts.items()}

    sampled, rollouts = run(scenario())
    assert all(sampled[i : i + 2] != sampled[10:12] for i in range(10))
    for cut in (20, 12):
        assert rollouts[cut].token_ids == sampled[:52]
        assert not rollouts[cut].interrupted and rollouts[cut].truncated and all(rollouts[cut].loss_mask)
    # half the tag at the cut is no end: the whole phrase follows
    assert rollouts[11].token_ids[:15] == (*sampled[:11], 20, 21, *sampled[10:12]) and rollouts[11].interrupted


def test_an_invalid_plan_is_refused(engine, run):
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 4, "extra_args": {"msrl_interruption": {"cut": 3}}},
    }
    with pytest.raises(EngineError, match=r"400 .*is not an interruption plan"):
        run(engine.client.post("/inference/v1/generate", body))


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


async def insight(engine):
    """The server's routes, and the requests that reached its app."""
    return json.loads(await engine.client.get(server_insight.PATH))


async def refused(session, engine, method, path, headers):
    """The status of a request whose body, announced as 64 bytes, never arrives: nothing waits for it."""
    url, headers = engine.client.url + path, [*headers, ("Content-Length", "64"), ("Connection", "close")]
    async with session.request(method, url, headers=headers, skip_auto_headers=["Content-Type"]) as response:
        return response.status


def test_every_route_requires_the_secret(engine, run):
    """Every route of the server's own app by every method, and some that it does not have."""

    async def scenario():
        before = await insight(engine)
        found = {(kind, re.sub(r"\{[^}]*\}", "x", path)) for kind, path in before["routes"]}
        paths = {path for kind, path in found if kind != "websocket"} - {"/health"}
        paths |= {path.rstrip("/") + "/x" for kind, path in found if kind == "mount"}
        paths |= {"/nowhere", "/health/", "/health/x", "//health", "/health%2f", "/msrl/progress"}
        async with aiohttp.ClientSession() as session:
            codes = {
                (method, path): await refused(session, engine, method, path, [])
                for path in sorted(paths)
                for method in METHODS
            }
            codes |= {(m, "/health"): await refused(session, engine, m, "/health", []) for m in METHODS if m != "GET"}
            sockets = [path for kind, path in found if kind == "websocket"]
            for path in [*sockets, "/health", "/nowhere"]:
                with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                    await session.ws_connect(engine.client.url + path)
                codes["websocket", path] = refusal.value.status
            async with session.get(engine.client.url + "/health") as response:
                health = response.status
        return paths, codes, health, before["reached"], (await insight(engine))["reached"]

    paths, codes, health, before, after = run(scenario())
    for path in ("/collective_rpc", "/pause", "/update_weights", "/inference/v1/generate", "/v1/models", "/metrics"):
        assert path in paths
    assert len(paths) > 50 and any(method == "websocket" for method, _ in codes)
    assert {key: code for key, code in codes.items() if code not in (401, 403)} == {}
    assert health == 200
    assert after == before, "no refused request reached the app"


def test_only_the_exact_secret_given_once_is_accepted(engine, run):
    wrong = [
        [],
        [(SECRET_HEADER, "")],
        [(SECRET_HEADER, SECRET[:-1])],
        [(SECRET_HEADER, SECRET + "x")],
        [(SECRET_HEADER, SECRET.upper())],
        [(SECRET_HEADER, SECRET), (SECRET_HEADER, SECRET)],
        [(SECRET_HEADER, "x"), (SECRET_HEADER, SECRET)],
        [(SECRET_HEADER, f"{SECRET}, {SECRET}")],
        [("Authorization", f"Bearer {SECRET}")],
        [("Cookie", f"{SECRET_HEADER}={SECRET}")],
    ]

    async def scenario():
        async with aiohttp.ClientSession() as session:
            shut = [await refused(session, engine, "POST", "/pause", headers) for headers in wrong]
            async with session.get(engine.client.url + "/v1/models", headers={SECRET_HEADER: SECRET}) as response:
                return shut, response.status

    shut, known = run(scenario())
    assert (shut, known) == ([401] * len(wrong), 200)
    assert b"false" in run(engine.client.get("/is_paused"))


async def progress_once(engine, state):
    """The first look at an engine that shows a request in this state, `waiting` or `decoding`."""
    async with asyncio.timeout(240):
        while not getattr((progress := await engine.client.progress()).cores[0], state):
            await asyncio.sleep(0.01)
    return progress


def test_tokens_are_counted_without_a_request_to_the_core(engine, run):
    async def scenario():
        before = await engine.client.progress()
        await asked(engine, 0, 40)
        await asyncio.gather(*(asked(engine, seed, 7) for seed in range(8)))
        done = await engine.client.progress()
        long = asyncio.create_task(asked(engine, 0, 1900))
        during = await progress_once(engine, "decoding")
        in_flight = engine.client.in_flight
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        return before, done, during, in_flight

    before, done, during, in_flight = run(scenario())
    assert done.tokens - before.tokens == 40 + 8 * 7
    assert [(core.core, core.waiting, core.decoding) for core in done.cores] == [(0, 0, 0)]
    assert during.tokens > done.tokens and in_flight == 1 and engine.client.in_flight == 0


def test_a_cancelled_completion_is_aborted(engine, run):
    async def scenario():
        long = asyncio.create_task(asked(engine, 0, 1900))
        await asked(engine, 0, 20)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        await asked(engine, 0, 20)
        return await engine.client.post("/abort_requests", {})

    assert run(scenario()) == b'{"status":"aborted","aborted":0}'


def test_a_port_in_use_is_refused_in_one_line(engine, policies, tmp_path):
    recipe = recipe_for(policies["dense_a"], engine={"port": engine.server.port})
    line = rf"engine\.port: 127\.0\.0\.1:{engine.server.port} is in use; choose a free port"
    with pytest.raises(ValueError, match=line):
        EngineProcess.local(recipe, secret=SECRET, log_path=tmp_path / "log")


async def broken_weights_lose_completions(engine, policy):
    """A policy of NaN: vLLM reports -9999 for what it cannot compute."""
    await engine.client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(policy)}})
    for _ in range(2):
        with pytest.raises(CompletionLost, match=r"token 0: -9999.* is not a log-prob") as lost:
            await asked(engine, 0, 5)
        assert lost.value.reason == "no_logprobs"
    with pytest.raises(EngineError, match="engine-0: 3 completions in a row had no usable log-probabilities"):
        await asked(engine, 0, 5)


async def a_hung_core_is_noticed(engine):
    """The core hangs, the server's /health still succeeds, and a pending completion does not delay the error."""
    watching = asyncio.create_task(engine.watch())
    answer = asyncio.create_task(asked(engine, 0, 1900))
    await progress_once(engine, "decoding")
    core = next(p for p in psutil.Process(engine.server.pid).children(recursive=True) if "EngineCore" in p.name())
    core.suspend()
    # and the look at its progress needs no answer of the core
    await asyncio.wait_for(engine.client.progress(), 240)
    await asyncio.wait_for(engine.client.get("/health"), 240)
    with pytest.raises(EngineDied, match=r"(?s)engine-0 produced no token for \S+ s with .*; the end of .*fp32\.log"):
        await asyncio.wait_for(watching, 240)
    assert not answer.done()
    answer.cancel()


def test_precision_is_measured_in_the_engine_and_its_death_is_noticed(policies, run, tmp_path):
    limits = {"model": {}, "fp32": {"stall_timeout_s": 3, "max_lost_in_a_row": 3}}  # of the one that dies, and hangs
    both = {
        logits: recipe_for(policies["dense_a"], policy={"dtype": "bfloat16", "logits": logits}, engine=engine)
        for logits, engine in limits.items()
    }
    broken = tiny_policies.make_nan(policies["dense_a"], tmp_path / "nan")
    engines = {
        logits: EngineProcess.local(recipe, secret=SECRET, log_path=tmp_path / f"{logits}.log")
        for logits, recipe in both.items()
    }

    async def scenario():
        try:
            infos = dict(zip(engines, await asyncio.gather(*(e.start(version=3) for e in engines.values()))))
            victim = engines["model"]
            watching = asyncio.create_task(victim.watch())
            await asked(victim, 0, 5)
            await victim.client.pause(clear_cache=False)  # so that the next one does not end before the server
            answer = asyncio.create_task(asked(victim, 0, 1900))
            await progress_once(victim, "waiting")
            os.kill(victim.server.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="engine-0: POST /inference/v1/generate"):
                await answer
            with pytest.raises(EngineDied, match=r"engine-0 \(port \d+\) exited with code -9"):
                await watching
            await broken_weights_lose_completions(engines["fp32"], broken)
            await a_hung_core_is_noticed(engines["fp32"])
            return infos
        finally:
            await asyncio.gather(*(e.stop() for e in engines.values()))

    infos = run(scenario())
    assert {k: i.head_dtype for k, i in infos.items()} == {"model": "bfloat16", "fp32": "float32"}
    assert all((i.vocab_size, i.dtype, i.max_model_len) == (128, "bfloat16", 2048) for i in infos.values())
    assert all((i.world_size, i.weight_version, i.weight_digests) == (1, "3", ("",)) for i in infos.values())
    for logits, info in infos.items():
        check_engine(info, both[logits])
    with pytest.raises(ValueError, match=r"logits fp32: the trainer has float32, but the engine has bfloat16"):
        check_engine(infos["model"], both["fp32"])
    with pytest.raises(ValueError, match=r"logits model: the trainer has bfloat16, but the engine has float32"):
        check_engine(infos["fp32"], both["model"])
    with pytest.raises(ValueError, match=r"engine\.vllm\.max_model_len: 100 is too short for sequences of 1965"):
        check_engine(dataclasses.replace(infos["fp32"], max_model_len=100), both["fp32"])


def test_an_engine_that_cannot_start_reports_the_reason(policies, run, tmp_path):
    recipe = recipe_for(policies["dense_a"], vllm={"quantization": "fp9"})
    process = EngineProcess.local(recipe, secret=SECRET, log_path=tmp_path / "log")
    with pytest.raises(EngineDied, match=r"(?s)exited with code \d+ before it was up; the end of .*fp9"):
        run(process.start())

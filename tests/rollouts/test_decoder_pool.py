"""Decoder processes: the results of the same code in this process, whatever happens to the processes."""

import asyncio
import json
import os
import signal
from dataclasses import replace

import pytest
from decoder_pools import TOKENIZER, pool_of
from fakes.server import StandInServer, answer
from waiting import passes, until

from megatron_scalerl.batching.rollout_bytes import arrays_of, facts_of, read, rollout_of
from megatron_scalerl.engine.answers import EngineError, completion
from megatron_scalerl.engine.client import SamplingSpec
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.processes.worker_pool import MAX_EARLY_LOSSES, Worker
from megatron_scalerl.rollouts.decoder_pool import SLOTS
from megatron_scalerl.types import CompletionLost

pytestmark = pytest.mark.slow

WHERE = "engine-4: /generate"
PLAN = Plan(cut=1, phrase_ids=(8, 9), think_end_ids=(9,), answer_budget=4, eos_id=2)
IDS = tuple(TOKENIZER.encode("7+2=9</think>9<eos>", add_special_tokens=False))
LONG = answer(token_ids=IDS[:-3] * 20000 + IDS, logprobs=(-0.5,) * (len(IDS[:-3]) * 20000 + len(IDS)))


def encoded(body):
    return body if isinstance(body, bytes) else json.dumps(body).encode()


async def result(pool, body, plan=None, seed=0):
    """The decoded completion, or the error."""
    try:
        async with pool.slot():
            return (await pool.decode(encoded(body), plan=plan, seed=seed, where=WHERE))[0]
    except (EngineError, CompletionLost) as error:
        return error


def decoded(folder, *bodies, meanwhile=None, **settings):
    """(results of bodies that are decoded at once, processes that were replaced). meanwhile: called with the pool."""

    async def main():
        async with pool_of(folder, **settings) as pool:
            calls = [asyncio.create_task(result(pool, body)) for body in bodies]
            await passes(1)
            if meanwhile:
                await meanwhile(pool)
            return await asyncio.gather(*calls), pool.restarts

    return asyncio.run(main())


CASES = {
    "plain": (answer(), None),
    "an answer": (answer(token_ids=IDS, logprobs=(-0.5,) * len(IDS)), None),
    "truncated": (answer(token_ids=IDS, logprobs=(-0.5,) * len(IDS), finish_reason="length"), None),
    "forced": (answer(token_ids=(5, 8, 9, 6), logprobs=(-0.5, -9999.0, None, 9e-4)), PLAN),
    "lost": (answer(logprobs=(-0.5, -9999.0)), None),
    "aborted": (answer(finish_reason="abort"), None),
    "no response": (b"", None),
    "garbage": (b"\xff\xfe\0", None),
    "deep": (b"[" * 100_000, None),
    "two completions": ({"choices": answer()["choices"] * 2}, None),
}


def test_the_results_are_those_of_decoding_in_this_process(tmp_path):
    async def main():
        async with pool_of(tmp_path, workers=2) as pool:
            calls = [result(pool, body, plan, seed) for seed, (body, plan) in enumerate(CASES.values())]
            return await asyncio.gather(*calls)

    found = dict(zip(CASES, asyncio.run(main())))
    for seed, (name, (body, plan)) in enumerate(CASES.items()):
        try:
            expected = completion(encoded(body), plan=plan, seed=seed, source=WHERE)
        except (EngineError, CompletionLost) as error:
            assert (type(found[name]), str(found[name])) == (type(error), str(error)), name
            assert getattr(found[name], "reason", "") == getattr(error, "reason", "")
            assert "\n" not in str(error)
            continue
        assert rollout_of(read(found[name].data)) == rollout_of(expected), name
        assert found[name].completion == facts_of(arrays_of(rollout_of(expected))), name
    assert (found["an answer"].text, found["truncated"].text, found["plain"].text) == ("9", None, None)


async def stop_with_a_body(pool):
    os.kill(pool.pids[0], signal.SIGSTOP)
    await until(lambda: pool._workers._queue.qsize() < len(pool._workers._outstanding))


def test_a_decoder_that_is_killed_with_a_body_is_replaced_and_nothing_is_lost(tmp_path):
    async def kill(pool):
        await stop_with_a_body(pool)
        os.kill(pool.pids[0], signal.SIGKILL)

    bodies = [LONG, *[answer(logprobs=(-i, -0.5)) for i in range(SLOTS + 5)]]
    found, restarts = decoded(tmp_path, *bodies, meanwhile=kill)
    assert [read(f.data).rollout_logprobs[0] for f in found] == [-0.5, *(-float(i) for i in range(SLOTS + 5))]
    assert restarts == 1


def die_with(monkeypatch, *, times):
    """The first `times` processes that get a body of 3 tokens are killed."""
    ask, left = Worker.ask, [times]

    async def dying(self, head, body, *others):
        if b"[5, 6, 7]" in body and left[0]:
            left[0] -= 1
            os.kill(self.pid, signal.SIGKILL)
        return await ask(self, head, body, *others)

    monkeypatch.setattr(Worker, "ask", dying)
    return answer(token_ids=(5, 6, 7), logprobs=(-0.5,) * 3)


def test_a_body_that_ends_its_processes_is_lost_and_the_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.decoder_pool.MAX_LOST_IN_A_ROW", 2)
    found, restarts = decoded(tmp_path, answer(), die_with(monkeypatch, times=MAX_EARLY_LOSSES), answer())
    assert found[0].data == found[2].data
    assert restarts == MAX_EARLY_LOSSES
    assert isinstance(found[1], CompletionLost) and found[1].reason == "decoder_lost"
    with pytest.raises(CompletionLost, match=r"engine-4: .*: its exit with code -9"):
        raise found[1]


def test_bodies_that_end_every_process_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.decoder_pool.MAX_LOST_IN_A_ROW", 2)
    body = die_with(monkeypatch, times=99)
    with pytest.raises(RuntimeError, match=r"its exit with code -9 \(Killed\), 2 times in a row"):
        decoded(tmp_path, body, body, body)


async def test_a_process_that_does_not_start_is_an_error(tmp_path):
    pool = pool_of(tmp_path)
    [worker] = pool._workers._workers
    worker._program = replace(worker._program, setup=b"{")
    found = r"\(its exit with code 1\); the end of .*decoder-0.log:\nTraceback"
    with pytest.raises(RuntimeError, match=f"rollouts.decoders: .* {found}"):
        async with pool:
            pass


async def test_bodies_are_read_when_there_is_room_for_them_and_wait_in_their_sockets_until_then(tmp_path):
    async with pool_of(tmp_path) as pool, StandInServer(answer()) as client:
        os.kill(pool.pids[0], signal.SIGSTOP)
        spec = SamplingSpec(max_tokens=2)
        calls = [asyncio.create_task(client.generate([1], sampling=spec, decoder=pool)) for _ in range(40)]
        await until(lambda: not client.in_flight and len(pool._workers._outstanding) == SLOTS)
        held = len(pool._workers._outstanding)
        os.kill(pool.pids[0], signal.SIGCONT)
        found = await asyncio.gather(*calls)
    assert held == SLOTS
    assert len(found) == 40 and not pool.restarts


def test_a_cancelled_completion_frees_its_slot(tmp_path):
    async def cancel(pool):
        os.kill(pool.pids[0], signal.SIGSTOP)
        cancelled = [asyncio.create_task(result(pool, LONG)) for _ in range(SLOTS)]
        await passes()
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        os.kill(pool.pids[0], signal.SIGCONT)

    found, restarts = decoded(tmp_path, *[answer()] * (SLOTS + 1), meanwhile=cancel)
    assert [f.completion.tokens for f in found] == [2] * (SLOTS + 1)
    assert not restarts

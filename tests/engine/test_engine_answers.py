"""An engine's responses as rollouts, and which responses are refused."""

import asyncio
import base64
import io
import json

import msgspec
import numpy as np
import pytest
from aiohttp import web
from engine_recipes import recipe_for
from fakes.server import StandInServer, answer

from megatron_scalerl.batching.rollout_bytes import rollout_of
from megatron_scalerl.engine.answers import EngineError, EngineInfo, _Choice, arrays_of
from megatron_scalerl.engine.client import SamplingSpec
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.engine.numerics import check_engine
from megatron_scalerl.types import CompletionLost

PLAN = Plan(cut=1, phrase_ids=(8, 9), think_end_ids=(9,), answer_budget=4, eos_id=2)


def rollout(plan=None, **changes):
    choice = msgspec.convert(answer(**changes)["choices"][0], _Choice)
    return rollout_of(arrays_of(choice, plan=plan, seed=0, source="engine-4: /generate"))


def experts(array):
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_expert_choices_keep_their_width(dtype):
    array = np.arange(24, dtype=dtype).reshape(4, 3, 2)
    found = rollout(routed_experts=experts(array)).expert_choices
    assert (found.layers, found.topk, found.width) == (3, 2, np.dtype(dtype).itemsize)
    assert np.frombuffer(found.data, f"<u{found.width}").reshape(4, 3, 2).tolist() == array.tolist()


@pytest.mark.parametrize("array", [np.zeros((4, 3), np.uint8), np.zeros((4, 3, 2), np.float32)])
def test_another_array_is_refused(array):
    with pytest.raises(EngineError, match=r"engine-4: /generate: routed_experts: .* is not uint8 or uint16"):
        rollout(routed_experts=experts(array))


def header(text):
    """A .npy array that consists of this header only."""
    raw = text.encode()
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw).decode()


SHAPES = [(2**44, 1, 1), (2**62, 2, 2), (3, 1, 1)]
"""Far more than the bytes that follow."""


@pytest.mark.parametrize(
    "text",
    [
        *map(header, ["(", "-" * 9000 + "1", "{'descr': [], 'fortran_order': 0, 'shape': 3}", "\0", "{"]),
        *(header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}\n") for shape in SHAPES),
        *("%%%", "", "QUJD", experts(np.zeros((4, 3, 2), np.uint8))[:-8]),
    ],
)
def test_a_broken_array_is_refused(text):
    with pytest.raises(EngineError, match=r"routed_experts: the text is not a base64 \.npy array"):
        rollout(routed_experts=text)


def test_the_order_of_an_array_s_elements_does_not_matter():
    array = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    assert rollout(routed_experts=experts(np.asfortranarray(array))) == rollout(routed_experts=experts(array))


@pytest.mark.parametrize("value", [-9999.0, -10000.0, None, float("nan"), float("inf"), float("-inf"), 0.01])
@pytest.mark.parametrize("at", [0, 1])
def test_a_sampled_token_without_a_log_probability_loses_the_completion(value, at):
    logprobs = [-0.5, -0.25]
    logprobs[at] = value
    with pytest.raises(CompletionLost, match=rf"engine-4: /generate: token {at}: .* is not a log-p.*") as lost:
        rollout(logprobs=logprobs)
    assert lost.value.reason == "no_logprobs"


def test_the_log_probability_of_a_forced_token_is_ignored():
    found = rollout(PLAN, logprobs=(-0.5, -9999.0, -9999.0, 9e-4), token_ids=(5, 8, 9, 6))
    assert found.loss_mask == (True, False, False, True)
    assert found.rollout_logprobs == (-0.5, 0.0, 0.0, 9e-4)
    with pytest.raises(CompletionLost, match="token 3"):
        rollout(PLAN, logprobs=(-0.5, -1.0, -1.0, -9999.0), token_ids=(5, 8, 9, 6))


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "only 1 of 2 tokens have a version"),
        ({"weight_versions": [{"version": "²", "start": 0, "end": 2}]}, "policy version: '²' is not a number"),
        (
            {"weight_versions": [{"version": v, "start": i, "end": i + 1} for i, v in enumerate("43")]},
            "policy versions: token 1 has 3, older than 4",
        ),
        (
            {"weight_versions": [{"version": "3", "start": 1, "end": 2}]},
            "tokens 1 to 2 are no span that begins at token 0",
        ),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 10**12}]}, "and ends at or before token 2"),
        ({"finish_reason": "abort"}, "completion ended with 'abort' after 2 tokens"),
        ({"logprobs": (-0.5,)}, "the completion has 2 tokens and 1 log-probs"),
        ({"plan": PLAN}, "is not the forced phrase"),
    ],
)
def test_the_error_for_an_invalid_response_names_the_engine(changes, line):
    with pytest.raises(EngineError, match=f"engine-4: /generate: .*{line}"):
        rollout(**changes)


def asked(ask, *bodies):
    async def scenario():
        async with StandInServer(*bodies) as client:
            return await ask(client)

    return asyncio.run(scenario())


def generate(client):
    return client.generate([1], sampling=SamplingSpec(max_tokens=2))


ASKED = {
    "/inference/v1/generate": generate,
    "/inference/v1/generate prompt": lambda client: client.score([1, 2]),
    "/collective_rpc": lambda client: client.rpc("anything"),
    "/collective_rpc info": lambda client: client.info(),
    "/msrl/progress": lambda client: client.progress(),
}
WHOLE = json.dumps(answer()).encode()


BROKEN = [WHOLE[:-20], b"{}", b"[1", b'{"results": 3}', b"\xff\xfe", b'{"choices": []}', b"<html>"]


@pytest.mark.parametrize("body", BROKEN)
@pytest.mark.parametrize("path", ASKED)
def test_a_truncated_or_unexpected_response_is_an_engine_error(path, body):
    with pytest.raises(EngineError, match=f"engine-4: {path.split()[0]}"):
        asked(ASKED[path], body)


@pytest.mark.parametrize("token", [-5, 2**31, 10**15, 10**30])
def test_an_invalid_token_is_an_engine_error(token):
    with pytest.raises(EngineError, match="engine-4: /inference/v1/generate"):
        asked(generate, answer(token_ids=(5, token)))


@pytest.mark.parametrize("results", [[], [3], [{}], [{"vocab_size": "many"}]])
def test_the_workers_reports_are_checked(results):
    with pytest.raises(EngineError, match="engine-4"):
        asked(ASKED["/collective_rpc info"], {"results": results}, {"world_size": 1}, {"weight_version": "0"})


@pytest.mark.parametrize("row", [None, {}, {"3": {"logprob": -1.0}}, {"2": {"logprob": -9999.0}}])
def test_a_prompt_token_without_a_log_probability_is_an_error(row):
    with pytest.raises(EngineError, match=r"engine-4: /inference/v1/generate: prompt token 1: .* is not a log-prob"):
        asked(lambda client: client.score([1, 2]), {**answer(), "prompt_logprobs": [None, row]})


def test_many_lost_completions_in_a_row_end_the_run_and_a_good_one_resets_the_count():
    lost, good = answer(logprobs=(-9999.0, -1.0)), answer()

    async def ask(client):
        seen = []
        for _ in range(6):
            try:
                await generate(client)
                seen.append("good")
            except (CompletionLost, EngineError) as error:
                seen.append(type(error).__name__)
                last = error
        return seen, str(last)

    seen, last = asked(ask, lost, lost, good, lost, lost, lost)
    assert seen == ["CompletionLost"] * 2 + ["good"] + ["CompletionLost"] * 2 + ["EngineError"]
    assert last.startswith("engine-4: 3 completions in a row had no usable log-probabilities (engine.max_lost_in")


def test_a_request_shares_cached_prefixes_with_those_since_the_last_label_alone():
    bodies = []

    async def scenario(client):
        await generate(client)
        for version in (3, 4, 3):
            await client.set_version(version)
            await generate(client)
            await client.score([1, 2])
        client.note_version(5)
        await generate(client)

    async def respond(request):
        bodies.append(await request.json())
        return web.json_response({**answer(), "prompt_logprobs": [None, {"2": {"logprob": -1.0}}]})

    asked(scenario, respond)
    first, *salts = [body.get("cache_salt") for body in bodies if "new_version" not in body]
    assert first is None, "the engine has no version yet"
    assert [salt.partition("-")[0] for salt in salts] == ["3", "3", "4", "4", "3", "3", "5"]
    assert salts[0::2] == [*salts[1::2], salts[-1]] and len(set(salts)) == 4


def test_check_engine_distinguishes_user_errors_from_vllm_s(tmp_path):
    info = {
        "vocab_size": 8,
        "dtype": "float32",
        "head_dtype": "float32",
        "logprobs_mode": "raw_logprobs",
        "max_model_len": 4096,
        "pid": 1,
        "world_size": 1,
        "weight_version": "0",
        "weight_digests": ("",),
    }
    recipe = recipe_for(tmp_path)
    check_engine(EngineInfo(**info), recipe)
    for change, kind in (
        ({"dtype": "float16"}, EngineError),
        ({"logprobs_mode": "processed_logprobs"}, EngineError),
        ({"head_dtype": "bfloat16"}, ValueError),
        ({"max_model_len": 7}, ValueError),
    ):
        with pytest.raises(kind):
            check_engine(EngineInfo(**info | change), recipe)

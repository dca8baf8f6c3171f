"""The examples that ask a server for log-probabilities: each token's place, and advantages by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from rollout_groups import group, rollout
from stored_episodes import FORKED

from megatron_scalerl.batching.rollout_bytes import arrays_of, facts_of, facts_of_parts
from megatron_scalerl.losses import LossInputs

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from distill import Distill
from kl_to_base import KLToBase


async def answer(request):
    """As vLLM answers, null for the first token; the log-probability of each other is its place, negative."""
    asked = await request.json()
    assert (asked["max_tokens"], asked["prompt_logprobs"]) == (1, 0)
    places = [None, *({str(token): {"logprob": -i}} for i, token in enumerate(asked["prompt"][1:], 1))]
    return web.json_response({"choices": [{"prompt_logprobs": places}]})


async def test_each_sampled_token_has_the_log_probability_of_its_place():
    """A completion of one token, one with a forced token, and an episode whose second part begins without prompt."""
    samples = [*map(arrays_of, (rollout(tokens=(7,)), rollout(mask=(True, False, True)), *FORKED[:2]))]
    completions = (*map(facts_of, samples[:2]), facts_of_parts(samples[2:], (None, 0)))
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        teacher = Distill(url=f"http://{server.host}:{server.port}")
        columns = await teacher.score(replace(group([1] * 3, prompt=(1, 2)), completions=completions), samples)
    expected = [[-2], [-2, 0, -4], [-2, 0, 0], [0, 0, 0, -3, -4]]
    assert columns == [{"teacher_logprobs": column} for column in expected]


@pytest.mark.parametrize(
    ("algorithm", "advantages", "dropped"),
    [
        (Distill(url="", weight=2.0), [1.0, -4.0, 0.0], ""),
        (KLToBase(url="", coefficient=0.5), [1.25, 0.0, 0.0], "all_correct"),
    ],
)
def test_the_advantage_of_a_token_by_hand(algorithm, advantages, dropped):
    """The policy gives the tokens -1 and -2 nats, the server -0.5 and -4; ScaleRL's advantage is 1."""
    logprobs = torch.tensor([-1.0, -2.0, torch.nan], requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        rollout_logprobs=logprobs.detach(),
        advantages=torch.ones(3),
        loss_mask=torch.tensor([True, True, False]),
        token_weights=torch.ones(3),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
        columns={"teacher_logprobs": torch.tensor([-0.5, -4.0, 0.0])},
    )
    output = algorithm.loss(inputs)
    output.loss.backward()
    assert (-logprobs.grad).tolist() == advantages
    assert [output.metrics[name][:2].tolist() for name in algorithm.metrics] == [[-0.5, 2.0], [0.5, 2.0]]
    assert algorithm.separable and algorithm.drop_reason(group([1, 1])) == dropped

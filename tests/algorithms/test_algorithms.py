"""The algorithm of a recipe, those of users among them."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from recipe_files import small_recipe
from rollout_groups import group, group_of, rollout
from stored_episodes import FORKED

from megatron_scalerl.algorithms import ScaleRL, algorithm_of
from megatron_scalerl.batching.rollout_bytes import arrays_of, facts_of, facts_of_parts
from megatron_scalerl.controller.samples import empty_reason, samples_of
from megatron_scalerl.losses import LossInputs
from megatron_scalerl.types import Prompt, Score

sys.path.append(str(Path(__file__).parents[2] / "examples"))


TEACHER = {"t": {"path": "p"}}
TAUGHT = {"name": "distilled", "teachers": TEACHER}


@dataclass(frozen=True, kw_only=True)
class OneGroup(ScaleRL):
    """Trains the groups with a solved completion, at most `most` completions long."""

    most: int = 2

    def drop_reason(self, group):
        return "" if group.pass_rate and len(group.scores) <= self.most else "no completion of use"

    def loss(self, inputs):
        return super().loss(inputs)


def test_the_sections_of_a_recipe_are_the_fields_of_its_algorithm():
    sections = {"advantages": {"normalize": "prompt"}, "filters": {"zero_variance": False}}
    sections |= {"loss": {"name": "dapo", "clip_high": 0.3, "reduction": "token_mean"}}
    expected = dict(normalize="prompt", zero_variance=False, reduction="token_mean", loss_name="dapo")
    assert algorithm_of(small_recipe(**sections)) == ScaleRL(**expected, loss_options={"clip_high": 0.3})
    assert algorithm_of(small_recipe()) == ScaleRL() == algorithm_of(small_recipe(algorithm="scalerl"))
    assert algorithm_of(small_recipe()).separable and not algorithm_of(small_recipe(loss={"name": "gspo"})).separable


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": "ppo"}, "algorithm.name 'ppo': it has to be scalerl, distilled or 'module:Class'"),
        ({"algorithm": "rloo:REINFORCE"}, "algorithm.name 'rloo:REINFORCE': rloo has no REINFORCE"),
        ({"algorithm": "pathlib:Path"}, "algorithm.name 'pathlib:Path': it has to be a subclass"),
        ({"algorithm": {"name": "rloo:RLOO", "size": 2}}, "algorithm: rloo:RLOO does not take {'size': 2}"),
        ({"algorithm": {"name": "rloo:RLOO", "normalize": "none"}}, "algorithm.normalize: set this field in the"),
        ({"algorithm": {"normalize": "none"}}, "algorithm.normalize"),
        ({"algorithm": "no.such:Class"}, "algorithm.name 'no.such:Class': the module cannot be imported: "),
        ({"algorithm": "distilled"}, "algorithm.teachers is empty"),
        ({"algorithm": {"teachers": TEACHER}}, "algorithm.teachers has no effect in scalerl"),
        ({"algorithm": {"name": "rloo:RLOO", "teachers": TEACHER}}, "algorithm.teachers: rloo:RLOO does not use"),
        ({"algorithm": TAUGHT | {"gap_weight": "much"}}, "algorithm.gap_weight: 'much' is not a number"),
        ({"algorithm": TAUGHT | {"name": "distill:FromServer", "url": ""}}, "algorithm.teachers: distill:FromServer"),
        ({"algorithm": TAUGHT, "rollouts": {"temperature": 0.7}}, "algorithm.teachers needs rollouts.temperature 1"),
        ({"algorithm": TAUGHT | {"teachers": {"t": {"path": "p", "tasks": ["sums"]}}}}, "t.tasks: sums is not in"),
        (
            {"algorithm": TAUGHT | {"teachers": TEACHER | {"u": {"path": "q"}}}},
            "the task '' has the teachers .'t', 'u'.;",
        ),
        ({"loss": {"name": "ppo"}}, "loss.name 'ppo': it has to be cispo, .* or 'module:function'"),
        ({"algorithm": "rloo:RLOO", "loss": {"name": "ppo"}}, "loss.name 'ppo'"),
        ({"loss": {"clip_low": 0.2}}, "loss.clip_low is 0.2, but loss.name cispo"),
    ],
)
def test_an_algorithm_that_cannot_be_made_is_refused_with_its_key(sections, said):
    with pytest.raises(ValueError, match=said):
        algorithm_of(small_recipe(**sections))


def test_a_subclass_chooses_groups_and_its_reason_is_said():
    algorithm = algorithm_of(small_recipe(algorithm={"name": f"{__name__}:OneGroup", "most": 3}))
    groups = [group([1, 1, 1]), group([1] * 4, group_id=1), group([-1, -1], group_id=2)]
    plan = samples_of(groups, algorithm)
    assert list(plan.trained.advantages) == [0] and plan.trained.dropped == {
        1: "no completion of use",
        2: "no completion of use",
    }
    assert empty_reason(plan.stats) == "2 of 3 groups no completion of use"
    assert not algorithm.separable, "its loss has no mark"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, "algorithm.kl.to is base"),
        (
            {"policy": {"path": "p", "lora": {}}, "trainer": {"loss_in_chunk": False}},
            "algorithm.kl needs one pipeline",
        ),
        ({"policy": {"path": "p", "lora": {}}, "loss": {"name": "gspo"}}, "algorithm.kl needs a loss of independent"),
    ],
)
def test_a_divergence_that_cannot_be_computed_is_refused(sections, said):
    with pytest.raises(ValueError, match=said):
        algorithm_of(small_recipe(**sections, algorithm={"kl": {"coefficient": 0.1}}))


def test_leave_one_out_by_hand():
    algorithm = algorithm_of(small_recipe(algorithm={"name": "rloo:RLOO", "scale": 2.0}))
    plan = samples_of([group([1, -1, -1]), group([1, -1], group_id=1)], algorithm)
    assert [sample.advantage for sample in plan.samples] == pytest.approx([4, -2, -2, 4, -4])
    assert algorithm.separable and algorithm.loss_name == "cispo"
    of_sequences = algorithm_of(small_recipe(algorithm="rloo:RLOO", loss={"name": "gspo"}))
    assert not of_sequences.separable, "a ratio of a sequence is none of a chunk's tokens"


async def test_a_turns_credit_is_what_is_paid_from_it_on_less_the_mean_over_the_group():
    from turn_credit import TurnCredit

    one_turn = rollout(tokens=(7, 8), mask=(True, False))
    scores = [Score(correct=True, reward=1.5, turn_rewards=(0.25, 0.25, 1.0)), Score(correct=False, reward=-1.0)]
    prompt = Prompt(prompt_id="p", text="", answer="", token_ids=(1,))
    both = group_of([FORKED, one_turn], scores, prompt=prompt)
    samples = [arrays_of(sample) for sample in (*FORKED, one_turn)]
    first, second, third, alone = [c["turn_credit"].tolist() for c in await TurnCredit().score(both, samples)]
    # of the first turn 1.5 and -1 are to come, of the others the first episode's alone
    assert first == [1.25] * 3 and alone == [-1.25] * 2
    assert second == [0.0] * 5 and third == [0.0] * 8
    cut = [scores[0], Score(correct=False, reward=-1.0, reason="truncated", turn_rewards=(0.5, 0.25))]
    of_both = await TurnCredit().score(group_of([FORKED, FORKED], cut, prompt=prompt), 2 * samples[:3])
    credits = [column["turn_credit"].tolist() for column in of_both]
    # the second episode's turns end with -1, -1.5 and -1.75 to come: its third turn pays what the verdict lacks
    assert [credits[0], credits[3]] == [[1.25] * 3, [-1.25] * 3]
    assert [credits[1], credits[4]] == [[0, 0, 0, 1.375, 1.375], [0, 0, 0, -1.375, -1.375]]
    assert [credits[2][-1], credits[5][-1]] == [1.375, -1.375]


async def answer(request):
    """As vLLM answers, null for the first token; the log-probability of each other is its place, negative."""
    asked = await request.json()
    tokens = asked.pop("prompt")
    assert request.path == "/v1/completions" and asked == {"max_tokens": 1, "prompt_logprobs": 0}
    places = [{str(token): {"logprob": -place}} for place, token in enumerate(tokens)]
    return web.json_response({"choices": [{"prompt_logprobs": [None, *places[1:]]}]})


async def test_each_sampled_token_has_the_servers_log_probability_of_its_place():
    """A completion of one token, one with a forced token, and an episode whose second part begins without prompt."""
    samples = [*map(arrays_of, (rollout(tokens=(7,)), rollout(mask=(True, False, True)), *FORKED[:2]))]
    completions = (*map(facts_of, samples[:2]), facts_of_parts(samples[2:], (None, 0)))
    async with RawTestServer(answer) as server:
        settings = {"name": "distill:FromServer", "url": f"http://127.0.0.1:{server.port}"}
        teacher = algorithm_of(small_recipe(algorithm=settings))
        columns = await teacher.score(replace(group([1] * 3), completions=completions), samples)
    expected = [[-2], [-2, 0, -4], [-2, 0, 0], [0, 0, 0, -3, -4]]
    assert columns == [{"teacher_logprobs": column} for column in expected]


@pytest.mark.parametrize(
    ("name", "setting", "advantages", "dropped"),
    [
        ("distill:FromServer", {"gap_weight": 2.0, "url": ""}, [1.0, -4.0, 0.0], ""),
        (
            "distilled",
            {"gap_weight": "5e-1", "reward_weight": 1.0, "teachers": TEACHER},
            [1.25, 0.0, 0.0],
            "all_correct",
        ),
    ],
)
def test_the_advantage_of_a_token_by_hand(name, setting, advantages, dropped):
    """The policy gives the tokens -1 and -2 nats, the server -0.5 and -4; ScaleRL's advantage is 1."""
    algorithm = algorithm_of(small_recipe(algorithm={"name": name, **setting}))
    logprobs = torch.tensor([-1.0, -2.0, torch.nan], requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        rollout_logprobs=logprobs.detach(),
        advantages=torch.ones(3),
        loss_mask=torch.tensor([True, True, False]),
        token_weights=torch.ones(3),
        sequence_ids=torch.zeros(3).long(),
        columns={"teacher_logprobs": torch.tensor([-0.5, -4.0, 0.0])},
    )
    output = algorithm.loss(inputs)
    output.loss.backward()
    assert (-logprobs.grad).tolist() == advantages and algorithm.drop_reason(group([1, 1])) == dropped
    assert [output.metrics[name][:2].tolist() for name in algorithm.metrics] == [[-0.5, 2.0], [0.5, 2.0]]

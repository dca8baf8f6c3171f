"""From draw to answer text: seeds and cut points are reproducible, the answer follows the closing tag."""

import asyncio
import dataclasses
import re

import msgspec
import numpy as np
import pytest
from fakes.engine import StandInEngine
from recipe_files import SETTLED
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import _sampling
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.decoder import Setup, _text_decoder
from megatron_scalerl.rollouts.plans import TRAINING_PRIORITY, VALIDATION_PRIORITY, Plans
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.tiny.tokenizer import build_tokenizer
from megatron_scalerl.types import Prompt

SECTIONS = {
    "policy": {"path": "p"},
    "prompts": {"path": "q", **SETTLED},
    "interruption": {"thinking_tokens": [44, 52], "answer_tokens": 4},
}


def plans(tokenizer, **sections):
    return Plans(Recipe(name="r", steps=1, **{**SECTIONS, **sections}), tokenizer)


def answer(tokenizer, ids, **sections):
    """The answer's text as a decoder process finds it."""
    setup = Setup(
        answer=plans(tokenizer, **sections).answer_format(),
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        policy="p",
    )
    received = msgspec.json.decode(msgspec.json.encode(setup), type=Setup)
    return received.answer.answer_text(np.array(ids, dtype=np.uint32), _text_decoder(received))


@pytest.fixture(scope="module")
def tiny():
    return build_tokenizer()


def test_draws_depend_only_on_seed_group_and_index(tiny):
    s = plans(tiny)
    assert s.draw(1, 2, 3) == s.draw(1, 2, 3)
    draws = [s.draw(1, group, index) for group in range(40) for index in range(16)]
    assert len({d.seed for d in draws}) == len(draws)
    assert {d.thinking_cut for d in draws} == set(range(44, 53))
    assert all(0 <= d.seed < 2**31 for d in draws)
    assert s.draw(2, 2, 3) != s.draw(1, 2, 3)


@pytest.mark.parametrize("limit, expected", [(None, 10**6), (9, 9), (10**6, 10**6)])
def test_a_request_may_have_a_lower_budget_than_the_run(tiny, limit, expected):
    s = plans(tiny)
    draw = s.draw(1, 0, 0)
    most = s.spec(draw, 1).max_tokens
    assert most > 9
    prompt = Prompt(prompt_id="p", text="1", answer="1", token_ids=(1,))
    sampler, engine = Sampler(s, decoders=None, verifier=None), StandInEngine()

    async def refuse(prompt_token_ids, *, sampling, decoder):
        raise EngineError(str((sampling.max_tokens, sampling.interruption.cut)))

    engine.generate = refuse
    with pytest.raises(EngineError, match=re.escape(str((min(expected, most), draw.thinking_cut)))):
        asyncio.run(sampler.complete(engine, prompt, draw, priority=1, max_tokens=limit))


NO_TAGS = {
    "prompts": {"path": "q", "think_start": "", "think_end": ""},
    "interruption": {**SECTIONS["interruption"], "enabled": False},
}


def test_without_tags_the_whole_completion_is_the_answer(tiny):
    ids = tiny("1+2=3", add_special_tokens=False)["input_ids"]
    assert answer(tiny, [*ids, tiny.eos_token_id], **NO_TAGS) == "1+2=3"
    assert answer(tiny, ids) is None
    spec = plans(tiny, **NO_TAGS).spec(plans(tiny, **NO_TAGS).draw(1, 0, 0), 0)
    assert (spec.interruption, spec.max_tokens) == (None, 52 + 4)


@pytest.mark.parametrize("cpus", [True, False])
def test_without_seeds_for_training_only_validation_sends_its_seed(tiny, monkeypatch, cpus):
    monkeypatch.setattr("megatron_scalerl.engine.options.on_cpu", lambda: cpus)
    s = plans(tiny)
    draw = s.draw(1, 0, 0)
    training, validation = (_sampling(s.spec(draw, number)) for number in (TRAINING_PRIORITY, VALIDATION_PRIORITY))
    assert (training["seed"], validation["seed"]) == (draw.seed if cpus else None, draw.seed)


def test_interruption_off_shares_one_budget(tiny):
    off = plans(tiny, interruption={**SECTIONS["interruption"], "enabled": False})
    draw = off.draw(1, 0, 0)
    assert draw.thinking_cut == 0
    spec = off.spec(draw, 1)
    assert spec.interruption is None and spec.max_tokens == 56
    spec = plans(tiny).spec(plans(tiny).draw(1, 0, 0), 1)
    assert spec.interruption.answer_budget == 4 and 44 <= spec.interruption.cut <= 52


def test_a_natural_end_leaves_the_rest_of_the_budget_or_the_answers_own(tiny):
    for mode, whole in (("rest_of_budget", 56), ("answer_tokens", None)):
        s = plans(tiny, interruption={**SECTIONS["interruption"], "after_natural_end": mode})
        plan = s.spec(s.draw(1, 0, 0), 1).interruption
        assert (plan.whole_budget, plan.answer_budget) == (whole, 4)
    assert plans(tiny).spec(plans(tiny).draw(1, 0, 0), 1).interruption.whole_budget == 56, "the default"


def test_end_tokens_of_the_policy_stop_the_engine_and_are_not_in_the_answer(tiny, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 16]}')
    policy = {"policy": {"path": str(tmp_path)}}
    for enabled in (True, False):
        s = plans(tiny, **policy, interruption={**SECTIONS["interruption"], "enabled": enabled})
        spec = s.spec(s.draw(1, 0, 0), 1)
        assert spec.end_ids == (2, 16)
        assert _sampling(spec)["stop_token_ids"] == [2, 16]
    ids = tiny.encode("7</think>9", add_special_tokens=False)
    assert answer(tiny, [*ids, 16], **policy) == answer(tiny, [*ids, 2], **policy) == "9"
    assert _sampling(dataclasses.replace(spec, ignore_eos=True))["stop_token_ids"] == []


def test_a_phrase_that_would_end_the_completion_is_refused(tiny, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    with pytest.raises(ValueError, match=r"interruption\.phrase: the tokens \[4\]"):
        plans(tiny, policy={"path": str(tmp_path)})


def test_answer_of_the_tiny_tokenizer(tiny):
    ids = tiny.encode("7+2=9</think>9<eos>", add_special_tokens=False)
    assert answer(tiny, ids) == "9"
    assert answer(tiny, tiny.encode("7+2=9", add_special_tokens=False)) is None
    assert answer(tiny, tiny.encode("7</think>", add_special_tokens=False)) == ""


def test_a_tag_of_several_tokens_that_merged_with_its_neighbour():
    vocabulary = ["<eos>", "</", "think", ">", ">\n\n", "4", "2", "a", " "]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocabulary)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r">\n\n|</|think|>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    phrase = {"interruption": {**SECTIONS["interruption"], "phrase": "a"}}
    assert answer(fast, [7, 1, 2, 3, 5, 6, 0], **phrase) == "42"
    assert answer(fast, [7, 1, 2, 4, 5, 6, 0], **phrase).strip() == "42"
    assert answer(fast, [7, 1, 2, 5, 6, 0], **phrase) is None

"""From draw to answer text: seeds and cut points are reproducible, the answer follows the closing tag."""

import dataclasses
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_scalerl.engine.client import _sampling
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.tiny.tokenizer import build_tokenizer
from megatron_scalerl.types import Rollout

SECTIONS = {
    "policy": {"path": "p"},
    "prompts": {"path": "q"},
    "interruption": {"thinking_tokens": [44, 52], "answer_tokens": 4},
}


def sampler(tokenizer, **sections):
    return Sampler(Recipe(name="r", steps=1, **{**SECTIONS, **sections}), tokenizer, verifier=None)


def rollout(ids):
    n = len(ids)
    return Rollout(
        token_ids=tuple(ids),
        rollout_logprobs=(0.0,) * n,
        policy_versions=(0,) * n,
        loss_mask=(True,) * n,
        interrupted=False,
        truncated=False,
        thinking_cut=50,
        seed=0,
    )


@pytest.fixture(scope="module")
def tiny():
    return build_tokenizer()


def test_draws_depend_only_on_seed_group_and_index(tiny):
    s = sampler(tiny)
    assert s.draw(1, 2, 3) == s.draw(1, 2, 3)
    draws = [s.draw(1, group, index) for group in range(40) for index in range(16)]
    assert len({d.seed for d in draws}) == len(draws)
    assert {d.thinking_cut for d in draws} == set(range(44, 53))
    assert all(0 <= d.seed < 2**31 for d in draws)
    assert s.draw(2, 2, 3) != s.draw(1, 2, 3)


def test_interruption_off_shares_one_budget(tiny):
    off = sampler(tiny, interruption={**SECTIONS["interruption"], "enabled": False})
    draw = off.draw(1, 0, 0)
    assert draw.thinking_cut == 0
    spec = off._spec(draw, 1)
    assert spec.interruption is None and spec.max_tokens == 56
    spec = sampler(tiny)._spec(sampler(tiny).draw(1, 0, 0), 1)
    assert spec.interruption.answer_budget == 4 and 44 <= spec.interruption.cut <= 52


def test_a_natural_end_leaves_the_rest_of_the_budget_or_the_answers_own(tiny):
    for mode, whole in (("rest_of_budget", 56), ("answer_tokens", None)):
        s = sampler(tiny, interruption={**SECTIONS["interruption"], "after_natural_end": mode})
        plan = s._spec(s.draw(1, 0, 0), 1).interruption
        assert (plan.whole_budget, plan.answer_budget) == (whole, 4)
    assert sampler(tiny)._spec(sampler(tiny).draw(1, 0, 0), 1).interruption.whole_budget == 56, "the default"


def test_end_tokens_of_the_policy_stop_the_engine_and_are_not_in_the_answer(tiny, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 16]}')
    s = sampler(tiny, policy={"path": str(tmp_path)})
    for enabled in (True, False):
        s._recipe = s._recipe.model_copy(
            update={"interruption": s._recipe.interruption.model_copy(update={"enabled": enabled})}
        )
        spec = s._spec(s.draw(1, 0, 0), 1)
        assert spec.end_ids == (2, 16)
        assert _sampling(spec)["stop_token_ids"] == [2, 16]
    ids = tiny.encode("7</think>9", add_special_tokens=False)
    assert s.answer_text(rollout([*ids, 16])) == s.answer_text(rollout([*ids, 2])) == "9"
    assert _sampling(dataclasses.replace(spec, ignore_eos=True))["stop_token_ids"] == []


def test_a_phrase_that_would_end_the_completion_is_refused(tiny, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    with pytest.raises(ValueError, match=r"interruption\.phrase: expected tokens that end no sequence, found \[4\]"):
        sampler(tiny, policy={"path": str(tmp_path)})


def test_answer_of_the_tiny_tokenizer(tiny):
    ids = tiny.encode("7+2=9</think>9<eos>", add_special_tokens=False)
    assert sampler(tiny).answer_text(rollout(ids)) == "9"
    assert sampler(tiny).answer_text(rollout(tiny.encode("7+2=9", add_special_tokens=False))) is None
    assert sampler(tiny).answer_text(rollout(tiny.encode("7</think>", add_special_tokens=False))) == ""


def test_a_tag_of_several_tokens_that_merged_with_its_neighbour():
    vocabulary = ["<eos>", "</", "think", ">", ">\n\n", "4", "2", "a", " "]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocabulary)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r">\n\n|</|think|>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    s = sampler(fast, interruption={**SECTIONS["interruption"], "phrase": "a"})
    assert s.answer_text(rollout([7, 1, 2, 3, 5, 6, 0])) == "42"
    assert s.answer_text(rollout([7, 1, 2, 4, 5, 6, 0])).strip() == "42"
    assert s.answer_text(rollout([7, 1, 2, 5, 6, 0])) is None


def test_a_tokenizer_without_an_end_is_refused(tiny, tmp_path: Path):
    tiny.save_pretrained(tmp_path)
    nameless = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    nameless.eos_token = None
    with pytest.raises(ValueError, match="expected a tokenizer with an end-of-sequence token"):
        sampler(nameless)

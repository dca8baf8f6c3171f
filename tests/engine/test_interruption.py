"""Forced interruption: the rule in the engine and the rule in the controller, by hand and against each other."""

import dataclasses
import random
from collections import Counter

import pytest

from megatron_scalerl.engine.interruption import Forcing, Plan, draw_cut, tag, tag_variants

EOS, END, A, B = 2, 4, 7, 8


def plan(**changes):
    default = {"cut": 3, "phrase_ids": (5, END), "think_end_ids": (END,), "answer_budget": 2, "eos_id": EOS}
    return Plan(**default | changes)


def grow(plan, wishes, limit=200):
    """The completion of a policy that would sample `wishes`, with interruption: (tokens, forced)."""
    forcing, tokens, forced = Forcing(plan), [], []
    for wish in wishes:
        forced_token = forcing.next_token(tokens)
        forced.append(forced_token is not None)
        tokens.append(wish if forced_token is None else forced_token)
        if tokens[-1] == plan.eos_id or len(tokens) == limit:
            break
    return tokens, forced


@pytest.mark.parametrize(
    "wishes, tokens, mask, interrupted, truncated, answer_start",
    [
        # still thinking at the cut: phrase and tag at tokens 3 and 4, then the answer
        ([A, A, A, A, A, B, EOS], [A, A, A, 5, END, B, EOS], "TTTFFTT", True, False, 5),
        # the policy ended thinking by itself at token 1: never a phrase; two answer tokens, then cut off
        ([A, END, B, B, B, B], [A, END, B, B], "TTTT", False, True, 2),
        # a natural end exactly at the cut counts
        ([A, A, END, B, EOS], [A, A, END, B, EOS], "TTTTT", False, False, 3),
        # a natural end one token late does not
        ([A, A, A, END, B, B, EOS], [A, A, A, 5, END, B, EOS], "TTTFFTT", True, False, 5),
        # the end of sequence as the last token of the budget is the policy's own
        ([A, END, B, EOS], [A, END, B, EOS], "TTTT", False, False, 2),
        # interrupted, and the answer too long: the forced end of sequence is dropped
        ([A] * 9, [A, A, A, 5, END, A, A], "TTTFFTT", True, True, 5),
        # ended before thinking did
        ([A, EOS], [A, EOS], "TT", False, False, None),
        # the policy says the phrase by itself before the cut: it is its own token, and ends nothing
        ([5, A, A, A, A, B, EOS], [5, A, A, 5, END, B, EOS], "TTTFFTT", True, False, 5),
    ],
)
def test_by_hand(wishes, tokens, mask, interrupted, truncated, answer_start):
    by_hand(plan(), wishes, tokens, mask, interrupted, truncated, answer_start)


@pytest.mark.parametrize(
    "wishes, tokens, truncated, answer_start",
    [
        # thinking ended by itself at token 1: the answer has what is left of 6, tag and thinking counted
        ([A, END, B, B, B, B, B, B], [A, END, B, B, B, B], True, 2),
        ([A, END, B, B, B, EOS], [A, END, B, B, B, EOS], False, 2),
        # at the cut: never less than after a forced end
        ([A, A, END, B, B, B, B], [A, A, END, B, B, B], True, 3),
    ],
)
def test_a_natural_end_leaves_the_rest_of_the_whole_budget(wishes, tokens, truncated, answer_start):
    by_hand(plan(whole_budget=6), wishes, tokens, "TTTTTT", False, truncated, answer_start)
    # a forced end has the answer's own budget
    by_hand(plan(whole_budget=6), [A] * 9, [A, A, A, 5, END, A, A], "TTTFFTT", True, True, 5)


def by_hand(rules, wishes, tokens, mask, interrupted, truncated, answer_start):
    found, _ = grow(rules, wishes)
    tags = tag(found, rules)
    assert found[: tags.kept_length] == tokens
    assert "".join("FT"[m] for m in tags.loss_mask.tolist()) == mask
    assert (tags.interrupted, tags.truncated, tags.answer_start) == (interrupted, truncated, answer_start)
    if truncated:
        with pytest.raises(ValueError, match="is not the forced end of sequence, 2"):
            tag([*tokens, B, B], rules)


def test_a_partial_tag_at_the_cut_is_not_an_end():
    two = plan(cut=2, think_end_ids=(A, B), phrase_ids=(B, 5, A, B))
    # token 1 is the tag's first half, and the phrase begins with its second: the whole phrase still follows
    tokens, forced = grow(two, [5, A, B, B, B, B, EOS])
    assert tokens == [5, A, B, 5, A, B, EOS]
    assert forced == [False, False, True, True, True, True, False]
    tags = tag(tokens, two)
    assert (tags.interrupted, tags.answer_start, tuple(tags.loss_mask.tolist())) == (
        True,
        6,
        (True, True) + (False,) * 4 + (True,),
    )


def test_overlapping_tag_is_found():
    tokens, _ = grow(plan(cut=9, think_end_ids=(A, A, B), phrase_ids=(5, A, A, B)), [A, A, A, B, 6, 6, 6])
    assert tokens == [A, A, A, B, 6, 6, EOS]


class _Pieces:
    """A byte-pair vocabulary in which the tag's ends merge with their neighbors."""

    pieces = ("</", "think", ">", ">\n\n", ".</", "thinks", "x", "<", "</s>")

    def __len__(self):
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[i] for i in ids]


def test_a_tag_that_merges_with_its_neighbors_ends_thinking():
    first, last = tag_variants(_Pieces(), (0, 1, 2))
    assert (first, last) == ({4}, {3})
    assert tag_variants(_Pieces(), (1, 5)) == (frozenset(), frozenset())  # words stay words
    assert tag_variants(_Pieces(), (0, 1)) == ({4}, frozenset())
    assert tag_variants(_Pieces(), (8,)) == tag_variants(_Pieces(), (2,)) == (frozenset(), frozenset())
    merged = plan(cut=9, phrase_ids=(6, 0, 1, 2), think_end_ids=(0, 1, 2), eos_id=99)
    merged = dataclasses.replace(merged, think_end_first=first, think_end_last=last)
    for sampled in ([6, 4, 1, 3], [0, 1, 3], [6, 4, 1, 2], [0, 1, 2]):
        tokens, forced = grow(merged, sampled + [6] * 20, 30)
        assert tokens == [*sampled, 6, 6, 99] and not any(forced[:-1])
        assert tag(tokens, merged).answer_start == len(sampled)
    for sampled in ([4, 5, 3], [3, 1, 3], [4, 1, 4]):
        assert tag(grow(merged, sampled + [6] * 20, 30)[0], merged).interrupted
    assert Plan.from_extra_args(merged.to_extra_args()) == merged


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("distance", [-1, 1])
def test_a_tag_with_one_other_token_ends_nothing(place, distance):
    tag_ids = (20, 30, 40)
    rules = plan(cut=9, think_end_ids=tag_ids, phrase_ids=tag_ids)
    said = [A, *tag_ids]
    assert rules.ends_thinking(said, 4) and not rules.ends_thinking(said, 3)
    said[1 + place] += distance
    assert not rules.ends_thinking(said, 4)


def test_a_variant_of_a_tag_of_one_token_ends_thinking():
    rules = plan(think_end_last=frozenset({9}))
    assert rules.ends_thinking([A, 9], 2) and not rules.ends_thinking([A, 9], 1)


@pytest.mark.parametrize(
    "changes, longest",
    [
        ({}, 3 + 2 + 2 + 1),
        ({"whole_budget": 5}, 3 + 2 + 2 + 1),
        ({"whole_budget": 20}, 20 + 1),
    ],
)
def test_the_longest_completion_is_reached_and_not_passed(changes, longest):
    rules = plan(**changes)
    completions = [grow(rules, wishes)[0] for wishes in ([A] * 40, [A] * (rules.cut - 1) + [END] + [A] * 40)]
    assert max(map(len, completions)) == rules.max_tokens == longest


def test_a_plan_survives_json_and_is_checked():
    assert Plan.from_extra_args(plan().to_extra_args()) == plan()
    assert Plan.from_extra_args(None) is None and Plan.from_extra_args({"other": 1}) is None
    assert Plan.from_extra_args(plan(whole_budget=9).to_extra_args()) == plan(whole_budget=9)
    with pytest.raises(ValueError, match="is not an interruption plan"):
        Plan.from_extra_args({"msrl_interruption": {"cut": 3}})


def test_cuts_are_uniform_reproducible_and_independent():
    cuts = [draw_cut(1, group, index, 44, 52) for group in range(300) for index in range(16)]
    assert cuts == [draw_cut(1, group, index, 44, 52) for group in range(300) for index in range(16)]
    counts = [cuts.count(n) for n in range(44, 53)]
    assert sum(counts) == 4800  # both ends included, nothing outside
    # 4,800 draws over 9 values: chi-square with 8 degrees of freedom stays below 26.1 but once in a thousand
    assert sum((c - 4800 / 9) ** 2 / (4800 / 9) for c in counts) < 26.1
    assert draw_cut(2, 0, 0, 1, 10**9) != draw_cut(1, 0, 0, 1, 10**9)


def test_engine_and_controller_agree_on_ten_thousand_completions():
    rng = random.Random(7)
    seen = Counter()
    for case in range(10_000):
        cut, budget = rng.randint(1, 12), rng.randint(1, 6)
        end = tuple(rng.choices([A, B], k=rng.randint(1, 3)))
        rules = plan(
            cut=cut,
            think_end_ids=end,
            phrase_ids=(*rng.choices([A, B, 5, 6], k=rng.randint(0, 5)), *end),
            think_end_first=frozenset(rng.sample([5, 6], rng.choice([0, 0, 1, 2]))),
            think_end_last=frozenset(rng.sample([5, 6], rng.choice([0, 0, 1, 2]))),
            answer_budget=budget,
            whole_budget=(None, cut + budget, cut + budget + rng.randint(1, 9))[case % 3],
        )
        tags = agree(rules, rng.choices([A, B, 5, 6, EOS], [4, 4, 3, 3, 1], k=60), rng.choice([3, 9, 60]))
        seen[rules.whole_budget is not None, tags.interrupted, tags.truncated] += 1
    assert len(seen) == 8 and min(seen.values()) > 50, "every kind of end in both modes"


def agree(rules, wishes, limit):
    """Compare the tokens that the engine forced with those that the controller finds, and both with the budgets."""
    tokens, forced = grow(rules, wishes, limit)
    tags = tag(tokens, rules)
    assert tags.loss_mask.tolist() == [not f for f in forced[: tags.kept_length]]
    # what is dropped is the forced end of sequence and nothing else
    assert all(forced[tags.kept_length :]) and tokens[tags.kept_length :] in ([], [EOS])
    assert len(tokens) <= rules.max_tokens
    assert tags.interrupted == any(forced[: tags.kept_length])
    # the phrase is forced at the cut or nowhere
    assert not tags.interrupted or forced.index(True) == rules.cut
    # reading all tokens again at every step (a resumed request) gives the same as reading new ones only
    assert [Forcing(rules).next_token(tokens[:n]) is not None for n in range(len(tokens))] == forced
    if tags.answer_start is not None:
        natural = not tags.interrupted and rules.whole_budget is not None
        allowed = rules.whole_budget if natural else tags.answer_start + rules.answer_budget
        assert tags.kept_length <= allowed
        # cut off only by its budget, and every budget is used up before anything is cut off
        assert tags.truncated == (len(tokens) > allowed)
    return tags

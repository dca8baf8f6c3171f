"""The forced tokens are the paper's text, character for character, in every kind of vocabulary."""

import pytest
from byte_pair import PAPER_TEXT, byte_level, sentence_piece
from tokenizers import AddedToken

from megatron_scalerl.engine.interruption import Plan, plan_ids, tag_variants
from megatron_scalerl.recipe.sections import InterruptionSection
from megatron_scalerl.tiny.tokenizer import build_tokenizer


def added(**options):
    return AddedToken("</think>", normalized=False, **options)


def cleaning():
    tokenizer = byte_level()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return tokenizer


TOKENIZERS = {
    "tiny": build_tokenizer,
    "byte level": byte_level,
    "sentence piece": sentence_piece,
    "special tag": lambda: byte_level(tag=added(special=True)),
    "added tag": lambda: byte_level(tag=added()),
    "blanks that are cleaned up": cleaning,
    "tag that takes blanks along": lambda: byte_level(tag=added(special=True, lstrip=True)),
}


def forced(tokenizer, phrase=None):
    phrase = InterruptionSection().phrase if phrase is None else phrase
    return plan_ids(tokenizer, phrase, "</think>")


def decoded(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_forced_tokens_are_the_papers_text_and_close_thinking(kind):
    tokenizer = TOKENIZERS[kind]()
    ids, end = forced(tokenizer)
    assert decoded(tokenizer, ids) == PAPER_TEXT
    variants = dict(zip(("think_end_first", "think_end_last"), tag_variants(tokenizer, end)))
    plan = Plan(cut=3, phrase_ids=ids, think_end_ids=end, answer_budget=4, eos_id=1, **variants)
    assert plan.ends_thinking(ids, len(ids))


def test_space_and_tag_are_tokenized_as_in_a_warm_start():
    tokenizer = byte_level()
    ids, end = forced(tokenizer)
    assert list(ids) == tokenizer.encode(PAPER_TEXT, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(list(end)) == ["</", "think", ">"]
    assert tokenizer.convert_ids_to_tokens(list(ids[-3:])) == ["Ġ</", "think", ">"]


@pytest.mark.parametrize("phrase", ["Time is up .", "Time is up.\n\n", "\nTime  is up. ", ""])
@pytest.mark.parametrize("kind", ["blanks that are cleaned up", "special tag", "tag that takes blanks along"])
def test_every_phrase_keeps_its_whitespace(kind, phrase):
    tokenizer = TOKENIZERS[kind]()
    assert decoded(tokenizer, forced(tokenizer, phrase)[0]) == f"{phrase}</think>"


def test_a_phrase_or_a_tag_that_a_vocabulary_cannot_encode_is_refused():
    tokenizer = build_tokenizer()
    for think_end, said in (("</z>", "encoding and decoding turn"), ("", "has no tokens")):
        with pytest.raises(ValueError, match=rf"prompts\.think_end: .*{said}"):
            plan_ids(tokenizer, "", think_end)
    with pytest.raises(ValueError, match=r"interruption\.phrase: encoding and decoding turn .*, into '<unk>"):
        forced(tokenizer, "Stop now.")

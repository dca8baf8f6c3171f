"""Warm-start rows as tokens: what is excluded from the loss, how a completion ends, what is too long."""

import json

import pytest
from byte_pair import PAPER_TEXT, byte_level, sentence_piece
from json_lines import write
from recipe_files import SETTLED
from refusals import refused
from tokenizers import AddedToken
from transformers import PreTrainedTokenizer

from megatron_scalerl.engine.interruption import plan_ids
from megatron_scalerl.prompts.sft_examples import read_examples
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.tiny.tokenizer import build_tokenizer

PHRASE = PAPER_TEXT.removesuffix(" </think>")


def examples(folder, completions, tokenizer, sft=None, **sections):
    rows = [{"prompt": "4+2=", "completion": completion} for completion in completions]
    write(folder / "rows.jsonl", rows)
    defaults = {"name": "w", "steps": 1, "policy": {"path": str(folder)}, "prompts": {"path": "p", **SETTLED}}
    sft = {"path": str(folder / "rows.jsonl"), "add_eos": False, **(sft or {})}
    return read_examples(Recipe.model_validate({**defaults, "sft": sft, **sections}), tokenizer)


def spans(tokenizer, ids):
    """[T] character offsets of each token of a byte-level vocabulary, computed from the pieces."""
    at, found = 0, []
    for token in ids:
        width = len(tokenizer.convert_ids_to_tokens(token))
        found.append((at, at + width))
        at += width
    return found


BEFORE = ["", "6", "so it is 42.\n\n", "we add ", "x.", "6 is"]
AFTER = ["6", "\n\n6", ">6", "so", ""]


@pytest.mark.parametrize("forced", [PAPER_TEXT, f"{PHRASE}</think>", f"{PHRASE}\n\n</think>"])
def test_every_token_that_touches_the_phrase_is_masked_and_no_other(tmp_path, forced):
    tokenizer = byte_level()
    texts = [f"{before}{forced}{after}" for before in BEFORE for after in AFTER]
    found = examples(tmp_path, texts, tokenizer).samples
    alone = [token for part in (PHRASE, "</think>") for token in tokenizer.encode(part, add_special_tokens=False)]
    missed = 0
    for text, (_, rollout) in zip(texts, found, strict=True):
        ids = list(rollout.token_ids)
        assert tokenizer.decode(ids) == text
        start = text.index(PHRASE)
        end = start + len(forced)
        assert list(rollout.loss_mask) == [b <= start or a >= end for a, b in spans(tokenizer, ids)]
        assert rollout.interrupted
        missed += not any(ids[i : i + len(alone)] == alone for i in range(len(ids)))
    assert missed, "looked for as tokens of its own, the phrase would be missed here"


def test_other_rows_and_other_vocabularies(tmp_path):
    for tokenizer in (
        byte_level(tag=AddedToken("</think>", special=True, lstrip=True, normalized=False)),
        sentence_piece(),
    ):
        texts = ["We add 4 and 2. </think>6", f"We add {PAPER_TEXT} 6", f"4 {PAPER_TEXT} so {PAPER_TEXT} 6"]
        masks = [r.loss_mask for _, r in examples(tmp_path, texts, tokenizer).samples]
        width = len(plan_ids(tokenizer, PHRASE + " ", "</think>")[0])
        dropped = [mask.count(False) for mask in masks]
        assert dropped[0] == 0 and all(abs(n - width * k) <= k for k, n in enumerate(dropped)), dropped


def test_a_custom_phrase_with_its_whitespace(tmp_path):
    tokenizer = byte_level()
    [(_, rollout)] = examples(
        tmp_path, ["so it is.\n\nTime is up. </think>6"], tokenizer, interruption={"phrase": "\n\nTime is up. "}
    ).samples
    kept = [t for t, keep in zip(rollout.token_ids, rollout.loss_mask) if keep]
    assert tokenizer.decode(kept) == "so it is6", "the full stop went with the blank line that it is one token with"


def test_a_phrase_without_its_tag_is_an_error_that_names_the_line(tmp_path):
    line = r"rows.jsonl: line 2: '</think>' has to follow the forced phrase 'Okay, "
    for text in (f"4 {PHRASE} So 6", f"4 {PHRASE} So {PAPER_TEXT}6"):
        with refused(line):
            examples(tmp_path, ["6", text], byte_level())


class _NoOffsets(PreTrainedTokenizer):
    """A tokenizer with one token per character, in Python."""

    vocab_size = 128

    def get_vocab(self):
        return {chr(i): i for i in range(128)}

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def test_a_slow_tokenizer_is_refused_only_where_it_matters(tmp_path):
    slow = _NoOffsets()
    assert len(examples(tmp_path, ["so 6"], slow).samples) == 1
    with refused(r"line 2: _NoOffsets gives no character offsets"):
        examples(tmp_path, ["6", f"4{PAPER_TEXT}6"], slow)


def test_an_end_of_sequence_is_appended_where_it_is_missing(tmp_path):
    tokenizer = byte_level()
    eos, eot = tokenizer.convert_tokens_to_ids(["<eos>", "<eot>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, eot]}))
    texts = ["4 6", "4 6<eos>", "4 6<eot>", f"4{PAPER_TEXT}"]
    plain = examples(tmp_path, texts, tokenizer).samples
    ended = examples(tmp_path, texts, tokenizer, {"add_eos": True}).samples
    for i, ((_, before), (_, after)) in enumerate(zip(plain, ended, strict=True)):
        added = (eos,) if i in (0, 3) else ()
        assert after.token_ids == before.token_ids + added
        assert after.loss_mask == before.loss_mask + (True,) * len(added)
    assert [r.token_ids[-1] for _, r in ended] == [eos, eos, eot, eos]
    with refused(r"line 1: token 2 of 3 ends the sequence"):
        examples(tmp_path, ["6<eot>\n"], tokenizer, {"add_eos": True})
    assert len(examples(tmp_path, ["6<eot>\n"], tokenizer).samples) == 1


@pytest.mark.parametrize("limited_by", ["trainer.micro_batch_tokens", "max_position_embeddings of the policy"])
def test_too_long_rows_are_refused_or_skipped_and_counted(tmp_path, limited_by):
    """4+2=<think> and <bos> are six tokens in the tiny vocabulary."""
    sections = {"trainer": {"micro_batch_tokens": 16}}
    if limited_by.startswith("max"):
        (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 16}}')
        sections = {}
    texts = ["0" * 9, "0" * 10, "0" * 11]
    line = rf"rows.jsonl: line 3: 17 tokens are more than 16 \({limited_by}\)"
    tokenizer = build_tokenizer()
    with refused(line):
        examples(tmp_path, texts, tokenizer, **sections)
    found = examples(tmp_path, texts * 12, tokenizer, {"too_long": "skip"}, **sections)
    assert [len(r.token_ids) for _, r in found.samples] == [9, 10] * 12
    lines = found.lines()
    assert lines[0] == "sft: 24 examples, 12 too long and skipped (sft.too_long):" and len(lines) == 12
    assert lines[1].endswith(f"rows.jsonl: line 3: 17 tokens are more than 16 ({limited_by})")
    assert lines[-1] == "  and 2 more"
    # the end of sequence counts
    with refused(r"line 2: 17 tokens are more than 16"):
        examples(tmp_path, texts, tokenizer, {"add_eos": True}, **sections)
    with refused(r"rows.jsonl: all rows have more than 16 tokens"):
        examples(tmp_path, texts[2:], tokenizer, {"too_long": "skip"}, **sections)


def test_columns_that_are_not_texts(tmp_path):
    with refused("line 1: 'completion' has half of a surrogate pair"):
        examples(tmp_path, ["6\ud83d"], build_tokenizer())

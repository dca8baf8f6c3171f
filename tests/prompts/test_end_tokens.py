"""Tokens that end a completion: the tokenizer's token, and those of the policy's folder."""

import json

import pytest
from refusals import refused
from transformers import PreTrainedTokenizerFast

from megatron_scalerl.prompts.end_tokens import end_token_ids
from megatron_scalerl.tiny.tokenizer import EOS_ID, build_tokenizer


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "files, more",
    [
        ({}, ()),
        ({"generation_config": {"eos_token_id": EOS_ID}}, ()),
        ({"generation_config": {"eos_token_id": [9, EOS_ID, 7]}}, (7, 9)),
        ({"generation_config": {"top_k": 20}, "config": {"eos_token_id": 9}}, ()),
        ({"config": {"eos_token_id": 9}}, (9,)),
        ({"config": {"text_config": {"eos_token_id": [9, 7], "vocab_size": 10}}}, (7, 9)),
    ],
)
def test_the_tokenizers_first_then_the_folders(tmp_path, files, more):
    assert end_token_ids(write(tmp_path, **files), build_tokenizer()) == (EOS_ID, *more)


@pytest.mark.parametrize(
    "content, line",
    [
        ({"eos_token_id": "</s>"}, r"eos_token_id is '</s>'; it has to be"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id is \[2, -1\]; it has to be"),
        ({"eos_token_id": [2, True]}, r"eos_token_id is \[2, True\]; it has to be"),
        ([], "the file holds a list"),
        ("{", "the file is not valid JSON: "),
    ],
)
def test_an_invalid_token_id_is_refused(tmp_path, content, line):
    with refused(f"generation_config.json: {line}"):
        end_token_ids(write(tmp_path, generation_config=content), build_tokenizer())


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path):
    write(tmp_path, generation_config={"eos_token_id": [2, 64]}, config={"vocab_size": 64})
    with refused(r"generation_config.json: eos_token_id is \[2, 64\]; .* below vocab_size 64"):
        end_token_ids(tmp_path, build_tokenizer())


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    nameless = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    nameless.eos_token = None
    with refused("the tokenizer has no end-of-sequence token"):
        end_token_ids(tmp_path, nameless)

"""Think tags may be several tokens but must decode to themselves; the model needs a row per token."""

import pytest
from refusals import refused
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_scalerl.prompts.chat import check_think_tags
from megatron_scalerl.prompts.rendering import check_vocabulary
from megatron_scalerl.tiny.tokenizer import build_tokenizer


def character_tokenizer(characters):
    """One token per character of `characters`; any other character is lost in <unk>."""
    vocabulary = {character: index for index, character in enumerate(dict.fromkeys(characters))}
    vocabulary["<unk>"] = len(vocabulary)
    inner = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def test_tags_of_one_token_and_of_several_are_accepted():
    check_think_tags(build_tokenizer(), "<think>", "</think>")
    check_think_tags(character_tokenizer("<>/think"), "<think>", "</think>")


def test_tags_that_do_not_survive_are_refused():
    lossy = character_tokenizer("<>think")
    with refused(r"prompts\.think_end: '</think>' becomes '<<unk>think>'"):
        check_think_tags(lossy, "<think>", "</think>")
    with refused(r"prompts\.think_start: .* when the tokenizer encodes and decodes it"):
        check_think_tags(lossy, "<Think>", "<think>")


@pytest.mark.parametrize("end", ["</think>", ""])
def test_empty_tags_pass(end):
    check_think_tags(build_tokenizer(), "", end)


def test_a_padded_model_vocabulary_is_accepted_and_a_small_one_is_not():
    tokenizer = build_tokenizer()
    check_vocabulary(tokenizer, 64)
    check_vocabulary(tokenizer, 22)
    with refused("the model has a vocabulary of 21 tokens, fewer than the 22 of the tokenizer"):
        check_vocabulary(tokenizer, 21)


def test_holes_in_the_vocabulary_count():
    inner = Tokenizer(models.WordLevel(vocab={"a": 0, "<unk>": 9}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    with refused("fewer than the 10 of the tokenizer"):
        check_vocabulary(tokenizer, 9)

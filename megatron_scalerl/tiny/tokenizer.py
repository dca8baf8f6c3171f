"""The tokenizer of the tiny policies: one token per character, and one token for `PAPER_PHRASE`, with which thinking
is ended."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_scalerl.recipe.sections import PAPER_PHRASE

SPECIAL = ("<pad>", "<bos>", "<eos>")
UNKNOWN = "<unk>"
TOKENS = (*SPECIAL, "<think>", "</think>", PAPER_PHRASE, *"0123456789+-*=;", UNKNOWN)
"""The 22 tokens, in the order of the ids."""
PAD_ID, BOS_ID, EOS_ID, THINK_START_ID, THINK_END_ID, PHRASE_ID = range(6)
MODEL_VOCABULARY = 64
"""Rows of the policies' embedding and logit projection; no token uses the last 42 rows."""
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that joins the texts of all messages, since the tiny policies have no roles."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, 22 tokens; `<bos>` is prepended when special tokens are requested.

    The think tags and `PAPER_PHRASE` are no special tokens, so that decoding without special tokens keeps the three.
    The space before `</think>` in the paper is the last character of the phrase.
    """
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    inner = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    # `Fuse` joins tokens without the spaces that decoding would add
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    inner.add_tokens(
        [
            AddedToken("<think>", normalized=False),
            AddedToken("</think>", normalized=False),
            AddedToken(PAPER_PHRASE, normalized=False),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(path: str | Path) -> None:
    """Write the tokenizer as a Hugging Face folder."""
    build_tokenizer().save_pretrained(path)

"""Tokenizers of the published kinds, trained on a few lines: how they cut the think tags and the forced phrase."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAPER_TEXT = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
"""The forced text as the paper prints it."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    PAPER_TEXT,
    f"<think>so it is 42.\n\n{PAPER_TEXT}\n\nThe answer is 42.",
    "We add 4 and 2.\n\nThen it is 6. </think>\n\n6",
    "so that is it.</think>4 and >4, a >\n\nb",
] * 40


def byte_level(*, tag=None):
    """As Llama 3 and Qwen: byte-level pieces, blanks joined to what follows, trimmed offsets. tag: an added token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<bos>", "<eos>", "<eot>"],
        show_progress=False,
    )
    inner.train_from_iterator(_CORPUS, trainer)
    if tag is not None:
        inner.add_special_tokens([tag]) if tag.special else inner.add_tokens([tag])
    inner.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 0)]),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")


def sentence_piece():
    """As Llama 2: blanks are a mark before a word, and one stands before every text's first word."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<bos>", "<eos>"], show_progress=False)
    inner.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")

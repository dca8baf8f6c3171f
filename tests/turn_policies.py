"""Policies that talk in several turns: a byte-level tokenizer with the special tokens of a family, and its folder."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_scalerl.prompts.turns import PastTurn

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>", "<end>", "<|eot_id|>", "</s>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<User>")
"""Tokens that are not special."""
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
KIMI = (
    *("<|im_user|>", "<|im_system|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
"""Further special tokens of these families."""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {}, "b": {}}}}


def turns_tokenizer(template, *, end="<|im_end|>", bos=None, more=()):
    """A token per byte, one for two line ends, and those above. more: further special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*alphabet, "ĊĊ"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, normalized=False) for token in PLAIN])
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in more])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=template,
        eos_token=end,
        bos_token=bos,
        additional_special_tokens=[*SPECIAL, *more],
        clean_up_tokenization_spaces=False,
    )


def save_policy(folder, template):
    """A folder with the tokenizer, whose turns also end with `<|endoftext|>`."""
    tokenizer = turns_tokenizer(template)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 512, "eos_token_id": ends}))
    return tokenizer


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def past(tokenizer, answer, *, thought=None):
    """A turn of these tokens; with a thought, the policy closes it."""
    thinking = [] if thought is None else ids_of(tokenizer, f"\n{thought}\n</think>")
    ids = [*thinking, *ids_of(tokenizer, answer)]
    return PastTurn(token_ids=tuple(ids), answer_start=len(thinking))

"""What a policy is talked to in, decided from its tokenizer: the chat template, and the tags in which it thinks."""

import pytest
from chat_templates import CHATML, GPT_OSS, LLAMA3, MAGISTRAL, QWEN3, R1_DISTILL
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_scalerl.prompts.chat import chat_of
from megatron_scalerl.recipe.sections import PromptsSection

THINK = ("<think>", "</think>")
NONE = ("", "")


def tokenizer_with(template, tokens=()):
    """Without tags in its vocabulary unless `tokens` has some."""
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(map(chr, range(32, 127)))}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)
    tokenizer.add_tokens(list(tokens))
    return tokenizer


DECIDED = {
    # template, tokens, settings, messages, warm start -> takes the template, tags, a part of the sentence
    "Qwen2.5": (CHATML, (), {}, True, (), True, NONE, "whole completion is the answer"),
    "Qwen2.5, text": (CHATML, (), {}, False, (), False, NONE, "prompts.chat_template true applies"),
    "Qwen2.5, warm start": (CHATML, (), {}, True, ("no", "2</think>3"), True, THINK, "as the warm start has it"),
    "a template is not its vocabulary": (CHATML, THINK, {}, True, (), True, NONE, "whole completion"),
    "Qwen3": (QWEN3, THINK, {}, True, (), True, THINK, "as the chat template has it"),
    "Qwen3, text": (QWEN3, THINK, {}, False, (), False, THINK, "rows of text do not take"),
    "Qwen3, flattened": (QWEN3, THINK, {"chat_template": False}, True, (), False, THINK, "messages do not take"),
    "Qwen3 does not think": (
        QWEN3, THINK, {"template_arguments": {"enable_thinking": False}}, True, (), True, NONE, "whole completion"
    ),
    "R1 distill": (R1_DISTILL, (), {"chat_template": True}, False, (), True, THINK, "rows of text take"),
    "Llama 3": (LLAMA3, (), {}, True, (), True, NONE, "whole completion"),
    "Magistral": (MAGISTRAL, (), {}, True, (), True, ("[THINK]", "[/THINK]"), "'[/THINK]'"),
    "gpt-oss": (
        GPT_OSS, (), {}, True, (), True,
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"), "chat template",
    ),
    "base": (None, (), {}, True, (), False, NONE, "the tokenizer has no chat template"),
    "base, warm start": (None, (), {}, False, ("x</think>",), False, THINK, "as the warm start has it"),
    "base, tokens": (None, ("[THINK]", "[/THINK]"), {}, False, (), False, ("[THINK]", "[/THINK]"), "vocabulary"),
    "the recipe's": (QWEN3, (), {"think_start": "", "think_end": ""}, True, (), True, NONE, "whole completion"),
    "the recipe's closing tag": (None, (), {"think_end": "</t>"}, False, (), False, ("", "</t>"), "as the recipe"),
    "the recipe's opening tag": (QWEN3, (), {"think_start": ""}, True, (), True, ("", "</think>"), "'</think>'"),
}  # fmt: skip


@pytest.mark.parametrize("case", DECIDED)
def test_template_and_tags_follow_from_tokenizer_rows_and_warm_start(case):
    template, tokens, settings, messages, warm_start, takes, tags, why = DECIDED[case]
    tokenizer = tokenizer_with(template, tokens)
    chat = chat_of(tokenizer, PromptsSection(**settings), messages=messages, warm_start=warm_start)
    assert (chat.chat_template, (chat.think_start, chat.think_end)) == (takes, tags)
    assert why in chat.why

"""Calls of tools are read in the format that the chat template teaches; what cannot be read says why."""

import pytest
from chat_templates import CHATML, QWEN3_TURNS
from turn_policies import TOOL, ids_of, turns_tokenizer

from megatron_scalerl.environments.response import ToolCall
from megatron_scalerl.rollouts.tool_calls import tool_parser

QWEN35 = CHATML + "{# <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call> #}"


def calls(template, text):
    tokenizer = turns_tokenizer(template)
    return tool_parser(tokenizer, [TOOL], [tokenizer.eos_token_id])(ids_of(tokenizer, text))


def call(arguments):
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def test_calls_are_read_in_their_order_and_the_end_of_the_turn_is_no_part_of_them():
    first = call('{"a": 1, "b": [2.5, null]}')
    second = call("{}")
    assert calls(QWEN3_TURNS, f"\n\nTwo sums. {first}\n{second}<|im_end|>") == (
        ToolCall(name="add", arguments={"a": 1, "b": [2.5, None]}, raw=first[12:-13]),
        ToolCall(name="add", arguments={}, raw=second[12:-13]),
    )
    assert calls(QWEN3_TURNS, "2<|im_end|>") == ()


UNREADABLE = {
    "<tool_call>add(1)</tool_call>": "invalid_json",
    '<tool_call>{"name": "add"': "unclosed_block",
    '<tool_call>{"arguments": {}}</tool_call>': "missing_name",
    '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>': "malformed_structure",
    call('"a=1"'): "malformed_structure",
    call('{"a": "\\ud800"}'): "invalid_json",
    call('{"a": ' + "[" * 5000 + "]" * 5000 + "}"): "invalid_json",
    call('{"a": ' + "7" * 5000 + "}"): "invalid_json",
}


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_call_that_cannot_be_read_says_why(text):
    [read] = calls(QWEN3_TURNS, f"{text}<|im_end|>")
    assert (read.error, read.name, read.arguments) == (UNREADABLE[text], "", None)
    assert read.raw and read.raw in text


def test_a_call_in_tags_has_its_texts_as_they_are():
    fields = "<parameter=a>\nParis\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    [read] = calls(QWEN35, f"<tool_call>\n<function=add>\n{fields}</function>\n</tool_call>")
    assert (read.name, read.arguments, read.error) == ("add", {"a": "Paris", "b": 2}, "")


@pytest.mark.parametrize("template", [CHATML, CHATML + "{# [TOOL_CALLS] ```json #}"])
def test_a_template_with_another_format_is_refused(template):
    with pytest.raises(ValueError, match=r"in none of the formats that can be read: qwen3\.5, glm, qwen3;"):
        calls(template, "")


def test_without_tools_nothing_is_read():
    tokenizer = turns_tokenizer(CHATML)
    assert tool_parser(tokenizer, (), ())(ids_of(tokenizer, call("{}"))) == ()

"""Calls of tools are read in the format that the chat template teaches; what cannot be read says why."""

import time

import pytest
from chat_templates import CHATML, KIMI_TURNS, LLAMA3_TURNS, QWEN3_TURNS
from turn_policies import KIMI, LLAMA, TOOL, ids_of, turns_tokenizer

from megatron_scalerl.environments.response import ToolCall
from megatron_scalerl.rollouts.tool_calls import tool_parser

QWEN35 = CHATML + "{# <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call> #}"


def calls(template, text, **tokens):
    tokenizer = turns_tokenizer(template, **tokens)
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


def kimi(*blocks):
    return f"Two sums.<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|><|im_end|>"


def kimi_call(name, arguments, end="<|tool_call_end|>"):
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}{end}"


def test_the_calls_of_kimi_k2_are_read():
    first, second, third, fourth, fifth = calls(
        KIMI_TURNS,
        kimi(
            kimi_call("functions.add:0", '{"a": 1, "b": [2.5, null]}'),
            kimi_call("functions.add:1", "a=1"),
            kimi_call("functions.add:2", "[1]"),
            kimi_call("", "{}"),
            kimi_call("functions.add:3", '{"a": 1}', end=""),
        ),
        more=KIMI,
    )
    raw = 'functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": [2.5, null]}'
    assert first == ToolCall(name="add", arguments={"a": 1, "b": [2.5, None]}, raw=raw)
    assert [read.error for read in (second, third, fourth, fifth)] == [
        "invalid_json",
        "malformed_structure",
        "missing_name",
        "unclosed_block",
    ]
    assert calls(KIMI_TURNS, "2<|im_end|>", more=KIMI) == ()


def test_the_call_of_llama_3_is_the_whole_answer():
    def read(text):
        return calls(LLAMA3_TURNS, f"{text}<|eot_id|>", end="<|eot_id|>", more=LLAMA)

    text = '{"name": "add", "parameters": {"a": 1}}'
    assert read(text) == (ToolCall(name="add", arguments={"a": 1}, raw=text),)
    assert read(f"I call {text}") == read('{"a": 1}') == read("{no JSON}") == ()
    assert [call.error for call in read('{"name": "add", "parameters": "a=1"}')] == ["malformed_structure"]
    assert [call.error for call in read('{"name": "\\ud800", "parameters": {}}')] == ["invalid_json"]


HOSTILE = {
    "llama": (
        LLAMA3_TURNS,
        LLAMA,
        ['{"a":' * 6400, "{" + " " * 32000 + "}", "{" * 32000, "<|end_header_id|>" * 32000],
    ),
    "kimi": (
        KIMI_TURNS,
        KIMI,
        [
            kimi_call("a" * 32000, "{}"),
            kimi(kimi_call("", " " * 32000 + "x")),
            kimi("<|tool_call_begin|>" * 32000),
            kimi(kimi_call("a", "{}") * 6400),
            "<think>" * 32000,
            "</think>" * 32000,
        ],
    ),
}


@pytest.mark.parametrize("family", HOSTILE)
def test_a_long_answer_is_read_in_time(family):
    """A tenth of a second each; a parser that is quadratic takes minutes."""
    template, tokens, texts = HOSTILE[family]
    tokenizer = turns_tokenizer(template, more=tokens)
    read = tool_parser(tokenizer, [TOOL], [tokenizer.eos_token_id])
    for text in texts:
        ids = ids_of(tokenizer, text)
        begin = time.process_time()
        read(ids)
        assert time.process_time() - begin < 5.0


@pytest.mark.parametrize("template", [CHATML, CHATML + "{# [TOOL_CALLS] ```json #}"])
def test_a_template_with_another_format_is_refused(template):
    with pytest.raises(ValueError, match=r"formats that can be read: qwen3\.5, glm, qwen3, kimi_k2, llama_3;"):
        calls(template, "")


def test_without_tools_nothing_is_read():
    tokenizer = turns_tokenizer(CHATML)
    assert tool_parser(tokenizer, (), ())(ids_of(tokenizer, call("{}"))) == ()

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
    _, read = tool_parser(tokenizer, [TOOL], [tokenizer.eos_token_id])(ids_of(tokenizer, text))
    return read


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


TYPED = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "properties": {
                "a": {"type": "integer"},
                "zip": {"type": "string"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "on": {"type": ["boolean", "null"]},
                "x": {"type": "number"},
                "at": {"type": "array"},
            }
        },
    },
}


def tags(*parameters, end="</function>"):
    pairs = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function=add>\n{pairs}{end}\n</tool_call>"


def glm(*pairs, end="</tool_call>"):
    fields = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in pairs)
    return f"<tool_call>add\n{fields}{end}"


def kimi(*blocks):
    return f"Two sums.<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|><|im_end|>"


def kimi_call(name, arguments, end="<|tool_call_end|>"):
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}{end}"


GLM = CHATML + "{# <tool_call>add <arg_key>a</arg_key> <arg_value>1</arg_value></tool_call> #}"
READ = {"a": 1, "zip": "12345"}
FORMS = {
    "qwen3": (
        QWEN3_TURNS,
        {
            call('{"a": 1, "zip": "12345"}'): READ,
            "<tool_call>add(1)</tool_call>": "invalid_json",
            "<tool_call>\n</tool_call>": "invalid_json",
            '<tool_call>{"name": "add"': "unclosed_block",
            '{"name": "add", "arguments": {"a": 1}}</tool_call>': "unopened_block",
            '<tool_call>{"arguments": {}}</tool_call>': "malformed_structure",
            '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>': "malformed_structure",
            '<tool_call>{"name": "add", "a": 1}</tool_call>': "malformed_structure",
            '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>': "malformed_structure",
            '<tool_call>{"name": "add", "arguments": {}, "a": 1}</tool_call>': "malformed_structure",
            '<tool_call>{"name": "add"}</tool_call>': "malformed_structure",
            '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>': "malformed_structure",
            '<tool_call>{"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": {"a": 2}}</tool_call>': (
                "invalid_json"
            ),
            call('"a=1"'): "malformed_structure",
            call('{"a": 1, "a": 2}'): "repeated_key",
            call('{"a": NaN}'): "invalid_value",
            call('{"a": 1e999}'): "invalid_value",
            call('{"a": "\\ud800"}'): "invalid_json",
            call('{"a": ' + "[" * 5000 + "]" * 5000 + "}"): "invalid_json",
            call('{"a": ' + "7" * 5000 + "}"): "invalid_json",
        },
    ),
    "qwen3.5": (
        QWEN35,
        {
            tags(("a", "1"), ("zip", "12345")): READ,
            tags(("a", "1"), ("zip", "  x\n\n")): {"a": 1, "zip": "  x\n\n"},
            tags(("maybe", "12345"), ("on", "True"), ("x", "2"), ("other", "[1]")): {
                "maybe": "12345",
                "on": True,
                "x": 2,
                "other": [1],
            },
            tags(("maybe", "null"), ("on", "None"), ("x", "2.5"), ("other", "[1")): {
                "maybe": None,
                "on": None,
                "x": 2.5,
                "other": "[1",
            },
            tags(("a", "one")): "invalid_value",
            tags(("x", "true")): "invalid_value",
            tags(("at", "1, 2")): "invalid_value",
            tags(("a", "1"), ("a", "2")): "repeated_key",
            tags(("a", "1"), end=""): "malformed_structure",
            tags(("a", "1"), end="<parameter=zip>\n12345\n</function>"): "malformed_structure",
            tags(("zip", "1\n<parameter=a>\n2")): "malformed_structure",
            tags(("a", "1"), end="</function>\n<function=add>\n</function>"): "malformed_structure",
            tags(("zip", "1</function>\n<function=add>\n<parameter=zip>2")): "malformed_structure",
            tags(("zip>12345</parameter><parameter=a", "1")): {"zip": "12345", "a": 1},
            tags(("a", "1</parameter>2")): "malformed_structure",
            tags((' name="a"', "1")): "malformed_structure",
            "<tool_call><function=add(a=1)></function></tool_call>": "malformed_structure",
            call('{"a": 1}'): "malformed_structure",
            f"{tags(('a', '1'))[:-12]}": "unclosed_block",
        },
    ),
    "glm": (
        GLM,
        {
            glm(("a", "1"), ("zip", "12345")): READ,
            glm(("a", "one")): "invalid_value",
            glm(("a", "1"), ("a", "2")): "repeated_key",
            glm(("a", "1"), end=""): "unclosed_block",
            glm(("a", "1"), end="<arg_key>zip</arg_key></tool_call>"): "malformed_structure",
            glm(("a", "1"), end="<arg_value>12345</arg_value></tool_call>"): "malformed_structure",
            glm(("zip", "1<arg_key>a</arg_key><arg_value>2")): "malformed_structure",
            glm(("a", "1"), end="add\n</tool_call>"): "malformed_structure",
            "<tool_call>add(a=1)</tool_call>": "malformed_structure",
            '<tool_call>add {"a": 1}</tool_call>': "malformed_structure",
            call('{"a": 1}'): "malformed_structure",
        },
    ),
    "kimi_k2": (
        KIMI_TURNS,
        {
            kimi(kimi_call("functions.add:0", '{"a": 1, "zip": "12345"}')): READ,
            kimi(kimi_call("functions.add:0", "a=1")): "invalid_json",
            kimi(kimi_call("functions.add:0", "[1]")): "malformed_structure",
            kimi(kimi_call("functions.add:0", '{"a": 1, "a": 2}')): "repeated_key",
            kimi(kimi_call("", "{}")): "malformed_structure",
            kimi(kimi_call("functions.add:0", '{"a": 1}', end="")): "malformed_structure",
            kimi('<|tool_call_begin|>functions.add:0{"a": 1}<|tool_call_end|>'): "malformed_structure",
            kimi('functions.add:0{"a": 1}'): "malformed_structure",
            kimi(kimi_call("functions.add:0", "{}", end='<|tool_call_end|>{"a": 1}')): "malformed_structure",
            kimi(kimi_call("functions.add:0", '{"a": 1}'))[:-36]: "unclosed_block",
        },
    ),
    "llama_3": (
        LLAMA3_TURNS,
        {
            '{"name": "add", "parameters": {"a": 1, "zip": "12345"}}': READ,
            '{"name": "add", "arguments": {"a": 1, "zip": "12345"}}': READ,
            '<|python_tag|>{"name": "add", "parameters": {"a": 1, "zip": "12345"}}': READ,
            '{"name": "add", "a": 1}': "malformed_structure",
            '{"name": "add", "arguments": {}, "parameters": {"a": 1}}': "malformed_structure",
            '{"parameters": {"a": 1}}': "malformed_structure",
            '{"name": "add", "parameters": "a=1"}': "malformed_structure",
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}': "invalid_json",
            '{"name": "add", "parameters": {"a": 1}': "invalid_json",
            '{"name": "\\ud800", "parameters": {}}': "malformed_structure",
            "<|python_tag|>add.call(a=1)": "invalid_json",
        },
    ),
}
TOKENS = {"kimi_k2": KIMI, "llama_3": LLAMA}


@pytest.mark.parametrize("name", FORMS)
def test_no_form_of_a_call_loses_an_argument_without_an_error(name):
    template, forms = FORMS[name]
    tokenizer = turns_tokenizer(template, more=TOKENS.get(name, ()))
    read = tool_parser(tokenizer, [TYPED], [tokenizer.eos_token_id])
    for text, expected in forms.items():
        before, calls = read(ids_of(tokenizer, text if name == "llama_3" else f"Sum.{text}"))
        found = [call.error or call.arguments for call in calls]
        assert found and set(map(repr, found)) <= {repr(expected)}, (text, calls)
        if "unopened" not in str(expected):
            assert before == {"kimi_k2": "Sum.Two sums.", "llama_3": ""}.get(name, "Sum."), text
        for call in calls:
            assert call.raw in text and bool(call.name) == (not call.error)


def test_what_stands_around_calls_is_no_call_but_a_mark_is():
    """Text before a call is its content, whatever the format."""
    tokenizer = turns_tokenizer(KIMI_TURNS, more=KIMI)
    read = tool_parser(tokenizer, [TOOL], [tokenizer.eos_token_id])
    one = kimi_call("functions.add:0", '{"a": 1}')
    assert read(ids_of(tokenizer, "2<|im_end|>")) == ("2", ())
    before, calls = read(ids_of(tokenizer, kimi(one, one.replace("0", "1"))))
    assert before == "Two sums." and [call.id for call in calls] == ["functions.add:0", "functions.add:1"]
    before, calls = read(ids_of(tokenizer, f"A{one}"))
    assert before == "A" and {call.error for call in calls} == {"unopened_block"}


@pytest.mark.parametrize("tools", [[{"function": 1}], [{"name": "f", "parameters": {"properties": [1]}}]])
def test_tools_that_are_no_schemas_are_refused(tools):
    tokenizer = turns_tokenizer(QWEN3_TURNS)
    with pytest.raises(ValueError, match="tools: each tool has to be a JSON schema"):
        tool_parser(tokenizer, tools, ())


def test_the_call_of_llama_3_is_the_whole_answer():
    def read(text):
        return calls(LLAMA3_TURNS, f"{text}<|eot_id|>", end="<|eot_id|>", more=LLAMA)

    text = '{"name": "add", "parameters": {"a": 1}}'
    assert read(text) == (ToolCall(name="add", arguments={"a": 1}, raw=text),)
    assert read(f"I call {text}") == read('{"a": 1}') == read("{no JSON}") == ()
    assert [call.error for call in read(f"I call <|python_tag|>{text}")] == ["unopened_block"]


HOSTILE = {
    "qwen3.5": (
        QWEN35,
        (),
        [
            "<tool_call>" * 16000,
            tags(("a", " " * 32000), end=""),
            f"<tool_call><function=add>{'<parameter=a>' * 3000}</function></tool_call>",
            f"<tool_call><function=add>{'</function> ' * 3000}</tool_call>",
        ],
    ),
    "glm": (GLM, (), [glm(*[("a" * 9, " " * 9)] * 1500, end="<arg_key></tool_call>"), "</tool_call>" * 9000]),
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
            kimi(kimi_call("a" + " " * 32000 + "b", "{}")),
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
    with pytest.raises(ValueError, match=r"with a format of qwen3\.5, glm, qwen3, kimi_k2, llama_3, or"):
        calls(template, "")

"""Parses the tool calls in an answer, in the format that the policy's chat template teaches.

A call whose text is not understood completely has an error: the parser drops no argument and ignores no text.
"""

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from megatron_scalerl.environments.response import ToolCall

NAME = re.compile(r"[\w.:/-]+")
TYPES = {int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", type(None): "null"}
"""Python type -> name of the type in a JSON schema."""
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's spelling of a value -> JSON's spelling. Policies of some chat templates write values as in Python."""


Types = dict[str, dict[str, set[str]]]
"""Name of a tool -> name of an argument -> allowed JSON types; an empty set allows every type."""


class _UnreadableCall(Exception):
    """A tool call cannot be parsed; the message is the reason in one word."""


def _json(text: str) -> Any:
    """Parse JSON. Raises ValueError or RecursionError for invalid JSON, and _UnreadableCall for a repeated key."""
    return json.loads(text, object_pairs_hook=_table)


def _table(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise _UnreadableCall("repeated_key")
    return table


def _value(text: str, types: set[str]) -> Any:
    """The value of an argument that the format writes as plain text. types: the allowed JSON types."""
    text = text.removeprefix("\n").removesuffix("\n")
    if types != {"string"}:
        with contextlib.suppress(ValueError):
            value = _json(PYTHON_WORDS.get(text, text))
            if not types or TYPES.get(type(value)) in types or (type(value) is int and "number" in types):
                return value
        if types and "string" not in types:
            raise _UnreadableCall("invalid_value")
    return text


def _read_json_call(text: str, types: Types, *, keys: Sequence[set[str]]) -> tuple[str, Any, Any]:
    """Parse a call of the form {"name": ..., KEY: {...}}. keys: a set {KEY} for each KEY that is allowed."""
    call = _json(text)
    if not isinstance(call, dict) or call.keys() - {"name"} not in keys:
        raise _UnreadableCall("malformed_structure")
    name = call.pop("name", "")
    return "", name, *call.values()


def _read_tagged_call(text: str, types: Types, *, call: str, argument: str) -> tuple[str, Any, Any]:
    """Parse a call whose arguments are in tags. call, argument: regular expressions."""
    match = re.fullmatch(call, text, re.DOTALL)
    if not match or re.sub(argument, "", match[2], flags=re.DOTALL).strip():
        raise _UnreadableCall("malformed_structure")
    name = match[1]
    tool_types = types.get(name, {})
    pairs = re.findall(argument, match[2], re.DOTALL)
    return "", name, _table([(key, _value(value, tool_types.get(key, set()))) for key, value in pairs])


def _read_kimi_call(text: str, types: Types) -> tuple[str, Any, Any]:
    """Parse a call of Kimi-K2: functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>."""
    call_id, _, arguments_text = text.partition("<|tool_call_argument_begin|>")
    arguments, end, trailing_text = arguments_text.rpartition("<|tool_call_end|>")
    if not end or trailing_text:
        raise _UnreadableCall("malformed_structure")
    call_id = call_id.rstrip()
    return call_id, call_id.partition(":")[0].removeprefix("functions."), _json(arguments)


IN_TAGS = r"<tool_call>(.*?)(?:(</tool_call>)|\Z)|</tool_call>"
Reader = Callable[[str, Types], tuple[str, Any, Any]]
"""A function that parses a call into (id, name, arguments). Raises as `_json`, and _UnreadableCall."""
FORMATS: dict[str, tuple[str, str, str, Reader]] = {
    "<function=": (
        "qwen3.5",
        "<tool_call>",
        IN_TAGS,
        partial(
            _read_tagged_call,
            call=r"<function=([^\s<>]+)>(.*)</function>",
            argument=r"<parameter=([^\s<>=]+)>((?:(?!<parameter=|<function=).)*?)</parameter>",
        ),
    ),
    "<arg_key>": (
        "glm",
        "<tool_call>",
        IN_TAGS,
        partial(
            _read_tagged_call,
            call=r"([^\s<>]+)(.*)",
            argument=r"<arg_key>([^\s<>]+)</arg_key>\s*<arg_value>((?:(?!<arg_key>|<arg_value>).)*?)</arg_value>",
        ),
    ),
    '"arguments":': ("qwen3", "<tool_call>", IN_TAGS, partial(_read_json_call, keys=({"arguments"},))),
    "<|tool_call_argument_begin|>": (
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        r"<\|tool_calls_section_begin\|>(.*?)(?:(<\|tool_calls_section_end\|>)|\Z)|<\|tool_call",
        _read_kimi_call,
    ),
    '"parameters": dictionary': (
        "llama_3",
        "<|eom_id|>",
        r'\A\s*(?:<\|python_tag\|>|(?=\{[^{}]*"(?:name|parameters)"))(.*)(\Z)|<\|python_tag\|>',
        partial(_read_json_call, keys=({"parameters"}, {"arguments"})),
    ),
}
"""Text in a chat template -> the format of tool calls: (name, token, pattern, reader).

A policy has the format if the chat template has the text and the tokenizer has the token. The pattern matches a block
of calls, with the text and the end of the block as groups, and also a tag outside of a block. The formats of Mistral
and DeepSeek-V3 are not supported.
"""
ERRORS = {None: "unopened_block", 1: "unclosed_block", 2: ""}
"""Error of a block of calls, by `re.Match.lastindex` of the match of a format's pattern: 2 if the block has an end, 1
if the block has no end, None for a tag outside of a block."""


ToolParser = Callable[[Sequence[int]], tuple[str, tuple[ToolCall, ...]]]
"""A function of an answer's token ids [A] that returns (text before the first call, calls)."""


def tool_parser(tokenizer: Any, tools: Sequence[Any], end_ids: Sequence[int]) -> ToolParser:
    """The parser of tool calls for a policy with these tools; without tools, the parser finds no calls.

    end_ids: tokens that end a completion. Raises ValueError for a chat template with no format of `FORMATS`, and for
    tools that are no JSON schemas of functions.
    """
    if not tools:
        return lambda token_ids: ("", ())
    source = tokenizer.get_chat_template(tools=tools)
    vocabulary = tokenizer.get_vocab()
    formats = [row for text, row in FORMATS.items() if text in source and row[1] in vocabulary]
    if not formats:
        raise ValueError(
            "environment: the chat template's format of tool calls is not supported; take a policy with a format of "
            f"{', '.join(row[0] for row in FORMATS.values())}, or remove the class's tools and let the class parse "
            "the policy's text"
        )
    _, _, blocks, read = formats[0]
    try:
        types = dict(map(_declaration, tools))
    except (AttributeError, TypeError):
        raise ValueError("tools: each tool has to be a JSON schema of a function") from None

    def calls(token_ids: Sequence[int]) -> tuple[str, tuple[ToolCall, ...]]:
        ids = [token for token in token_ids if token not in end_ids]
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        text_before = text
        tool_calls: list[ToolCall] = []
        for block in re.finditer(blocks, text, re.DOTALL):
            if not tool_calls:
                text_before = text[: block.start()]
            inner = block[1] or block[0]
            # Kimi-K2 puts several calls into one block.
            parts = [part.strip() for part in inner.split("<|tool_call_begin|>") if part.strip()]
            tool_calls += [_call(part, ERRORS[block.lastindex], read, types) for part in parts or [inner]]
        return text_before, tuple(tool_calls)

    return calls


def _declaration(tool: Any) -> tuple[str, dict[str, set[str]]]:
    """(name of a tool, name of an argument -> allowed types) from the tool's JSON schema."""
    function = tool.get("function", tool)
    properties = function.get("parameters", {}).get("properties", {})
    return function.get("name", ""), {name: _types(schema) for name, schema in properties.items()}


def _types(schema: Any) -> set[str]:
    """The names of the types that a JSON schema allows; empty if the schema allows every type."""
    names = schema.get("type", ())
    if isinstance(names, str):
        names = (names,)
    return {*names}.union(*map(_types, schema.get("anyOf", ())))


def _call(text: str, error: str, read: Reader, types: Types) -> ToolCall:
    """Parse the call in a text. error: the error of the call's block, empty without an error."""
    try:
        if error:
            raise _UnreadableCall(error)
        call_id, name, arguments = read(text, types)
        if not (isinstance(name, str) and NAME.fullmatch(name) and isinstance(arguments, dict)):
            raise _UnreadableCall("malformed_structure")
        nested: Any = arguments
        # A Reply puts fewer than 32 levels around the arguments, so the depth of JSON cannot become too large later.
        for _ in range(32):
            nested = [nested]
        if msgspec.json.decode(msgspec.json.encode(nested)) != nested:
            # JSON cannot hold all values: NaN and infinity become null.
            raise _UnreadableCall("invalid_value")
        return ToolCall(id=call_id, name=name, arguments=arguments, raw=text)
    except _UnreadableCall as problem:
        return ToolCall(raw=text, error=str(problem))
    except (ValueError, RecursionError):
        # The text is no JSON, exceeds Python's limits (depth, digits), or has characters that are no Unicode.
        return ToolCall(raw=text, error="invalid_json")

"""Reads calls of tools in an answer, in the format that the policy's chat template teaches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from megatron_scalerl.environments.response import ToolCall

FORMATS = {
    "<function=": ("qwen3.5", "<tool_call>"),
    "<arg_key>": ("glm", "<tool_call>"),
    '"arguments":': ("qwen3", "<tool_call>"),
    "<|tool_call_argument_begin|>": ("kimi_k2", "<|tool_calls_section_begin|>"),
    '"parameters": dictionary': ("llama_3", "<|eom_id|>"),
}
"""Text in a chat template -> (name of the parser, token with which calls begin, or which the format has).

Not here: Mistral, for which `renderers` has no parser, and DeepSeek-V3, whose parser takes minutes for an answer with
many spaces.
"""
KIMI_MARKS = (
    "tool_calls_section_begin",
    "tool_calls_section_end",
    "tool_call_begin",
    "tool_call_argument_begin",
    "tool_call_end",
)


ToolParser = Callable[[Sequence[int]], tuple[ToolCall, ...]]
"""The calls in the tokens of an answer, [A]."""


def tool_parser(tokenizer: Any, tools: Sequence[Any], end_ids: Sequence[int]) -> ToolParser:
    """The parser for a policy with these tools, if there are any.

    end_ids: tokens that end a completion. Raises ValueError for a chat template with another format.
    """
    if not tools:
        return lambda token_ids: ()
    source = tokenizer.get_chat_template(tools=tools)
    vocabulary = tokenizer.get_vocab()
    names = [name for text, (name, begin) in FORMATS.items() if text in source and begin in vocabulary]
    if not names:
        raise ValueError(
            "environment: the chat template's calls of tools are in none of the formats that can be read: "
            f"{', '.join(name for name, _ in FORMATS.values())}; take a policy with one of them, or let the "
            "environment read the text"
        )
    extract = _extractor(names[0], tokenizer, vocabulary)

    def calls(token_ids: Sequence[int]) -> tuple[ToolCall, ...]:
        ids = [token for token in token_ids if token not in end_ids]
        try:
            return tuple(map(_call, extract(ids)))
        except (ValueError, RecursionError):  # JSON beyond Python's limits, or that is no Unicode
            return (ToolCall(raw=tokenizer.decode(ids), error="invalid_json"),)

    return calls


def _extractor(name: str, tokenizer: Any, vocabulary: Mapping[str, int]) -> Callable[[list[int]], list[Any]]:
    """The parser of a format, which takes the tokens of an answer."""
    from renderers import parsers, parsing

    if name == "llama_3":
        return lambda ids: parsing.parse_llama_3(tokenizer, ids, stop_ids=set()).tool_calls
    if name == "kimi_k2":
        marks = {f"{mark}_id": vocabulary[f"<|{mark}|>"] for mark in KIMI_MARKS}
        return lambda ids: parsing.parse_kimi_k2(tokenizer, ids, stop_ids=set(), **marks).tool_calls
    parser = parsers.get_tool_parser(name, tokenizer)
    return lambda ids: parser.extract(ids)[1]


def _call(parsed: Any) -> ToolCall:
    """A call as the parser returned it."""
    error = str(parsed.status)
    readable = isinstance(parsed.name, str) and isinstance(parsed.arguments, dict)
    # formats other than JSON have texts as they are, which the parser notes
    if readable and error in ("ok", "invalid_json"):
        call = ToolCall(name=parsed.name, arguments=parsed.arguments, raw=parsed.raw)
        nested: Any = call
        for _ in range(32):  # deeper than in a Reply
            nested = [nested]
        msgspec.json.encode(nested)  # raises ValueError for half of a surrogate pair, RecursionError
        return call
    return ToolCall(raw=parsed.raw, error="malformed_structure" if error == "ok" else error)

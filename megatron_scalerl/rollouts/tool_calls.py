"""Reads calls of tools in an answer, in the format that the policy's chat template teaches."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from megatron_scalerl.environments.response import ToolCall

FORMATS = {
    "<function=": ("qwen3.5", "<tool_call>"),
    "<arg_key>": ("glm", "<tool_call>"),
    '"arguments":': ("qwen3", "<tool_call>"),
}
"""Text in a chat template -> (name of the parser, token with which calls begin)."""


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
    from renderers.parsers import get_tool_parser

    parser = get_tool_parser(names[0], tokenizer)

    def calls(token_ids: Sequence[int]) -> tuple[ToolCall, ...]:
        ids = [token for token in token_ids if token not in end_ids]
        try:
            return tuple(map(_call, parser.extract(ids)[1]))
        except (ValueError, RecursionError):  # JSON beyond Python's limits, or that is no Unicode
            return (ToolCall(raw=tokenizer.decode(ids), error="invalid_json"),)

    return calls


def _call(parsed: Any) -> ToolCall:
    """A call as the parser returned it."""
    error = str(parsed.status)
    readable = isinstance(parsed.name, str) and isinstance(parsed.arguments, dict)
    # formats other than JSON have texts as they are, which the parser notes
    if readable and error in ("ok", "invalid_json"):
        call = ToolCall(name=parsed.name, arguments=parsed.arguments, raw=parsed.raw)
        msgspec.json.encode(call)  # raises ValueError for half of a surrogate pair
        return call
    return ToolCall(raw=parsed.raw, error="malformed_structure" if error == "ok" else error)

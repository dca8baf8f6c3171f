"""A decoder process: `python -m megatron_scalerl.rollouts.decoder`, started and killed by `rollouts.decoder_pool`.

A decoder turns the responses of engines into completions: bytes for the store (`batching.rollout_bytes`), facts for
the controller, text and calls of tools for verifier and environment. A decoder also renders the messages of
environments as tokens. The frames (`processes.worker`):

    setup      Setup
    request    Request to decode, body of the response
    reply      Reply, bytes of the completion
    request    Request to render messages
    reply      Reply, tokens as u32

Without turns to render, the process imports no torch, and no transformers if the package `tokenizers` can decode the
policy's tokens.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import msgspec
import numpy as np

from megatron_scalerl.batching.rollout_bytes import facts_of, write
from megatron_scalerl.engine.answers import EngineError, completion
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.environments.response import Message, ToolCall
from megatron_scalerl.processes.worker import Answer, ignore_signals, serve
from megatron_scalerl.prompts.turns import PastTurn, TurnRenderer
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.record import record
from megatron_scalerl.rewards.math import extract_answer
from megatron_scalerl.rollouts.tool_calls import ToolParser, tool_parser
from megatron_scalerl.types import Completion, CompletionLost

TOOL_SETS = 16
"""Number of tool lists for which a process keeps a renderer of turns; beyond, the least recently used is dropped."""


@record
class AnswerFormat:
    """The rule by which the answer of a completion is found. Produced by `rollouts.plans`."""

    plan: Plan | None
    """An interruption plan of the run, of which only the closing tag is used; None for a policy without tags."""
    think_end: str
    """The closing tag of thinking as text."""
    hidden_ids: frozenset[int]
    """Ids of tokens that do not appear in the text: special tokens, and tokens that end a completion."""

    def answer_start(self, token_ids: np.ndarray) -> int | None:
        """Index of the first token after thinking in `token_ids` [T]; None if thinking did not end."""
        return 0 if self.plan is None else self.plan.thinking_end(token_ids)

    def answer_text(self, token_ids: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str | None:
        """The text after thinking, or the whole text of a policy without tags; None if thinking did not end.

        token_ids: [T] the completion. decode: turns token ids into text, special tokens included.
        """
        start = self.answer_start(token_ids)
        if start is None:
            return None
        if self.plan is not None:
            # The tag's tokens may include a part of the answer, so the tag is decoded too, and cut off as text.
            start -= len(self.plan.think_end_ids)
        text = decode([token for token in token_ids[start:].tolist() if token not in self.hidden_ids])
        if self.plan is None:
            return text
        return extract_answer(text, self.think_end)


@record
class TurnSettings:
    """The settings by which turns are rendered (`prompts.turns.TurnRenderer`) and tool calls are parsed."""

    prompts: str
    """The recipe's section prompts, with all defaults, as JSON."""
    end_ids: tuple[int, ...]
    thinking: Literal["keep", "strip"]
    tools: str = "[]"
    """The tools that the chat template shows to the policy, and whose calls are parsed, as JSON."""


@record
class Setup:
    """The settings of a decoder process, which hold for all requests of a run."""

    answer: AnswerFormat
    tokenizer: str | None
    """Text of the policy's tokenizer.json; None without this file, so that transformers loads the tokenizer."""
    policy: str
    """Hugging Face folder of the policy."""
    episodes: bool = False
    """Whether the run has episodes of several turns, so that requests may have `talk`."""


@record
class Request:
    """A request to render `messages` as tokens, or without messages, to decode a response, whose body follows."""

    plan: Plan | None = None
    """Interruption plan of the request that the engine has answered."""
    seed: int = 0
    """Sampling seed of the completion."""
    where: str = ""
    """Engine and HTTP path of the response, for error messages."""
    messages: tuple[tuple[Message, ...], ...] = ()
    """[turns + 1] the environment's messages before each turn of the policy; the last messages are new."""
    turns: tuple[PastTurn, ...] = ()
    talk: TurnSettings | None = None
    """The task's settings of turns; None for a completion of a single turn."""


@record
class Decoded:
    """A decoded completion. Produced by `rollouts.decoder_pool`."""

    completion: Completion
    data: bytes = b""
    """The completion in the format of `batching.rollout_bytes.write`; empty in a Reply, which the bytes follow."""
    text: str | None
    """Text after thinking; None if thinking did not end or the completion is truncated."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls in the text, in order."""
    before_calls: str = ""
    """The text before the first tool call."""
    answer_start: int = 0
    """Index of the first token after thinking; 0 without tags, or if thinking did not end."""


@record
class Reply:
    """The result of a request. A Reply without a failure precedes the completion's bytes or the rendered tokens."""

    decoded: Decoded | None = None
    error: str = ""
    """Message of an EngineError, or of a ValueError for messages that cannot be rendered."""
    lost: str = ""
    """Message of a CompletionLost."""
    lost_reason: str = ""
    rewritten: bool = False
    """True if the rendered tokens replace the context; False if the tokens are appended to the context."""


class Decoding:
    """Answers the requests to a decoder process: decodes a response, or renders messages."""

    def __init__(self, setup_json: bytes):
        setup = msgspec.json.decode(setup_json, type=Setup)
        self._format = setup.answer
        self._text = _text_decoder(setup)
        self._request = msgspec.json.Decoder(Request)
        if setup.episodes:
            # `prompts.tokenizer` imports transformers, which takes seconds.
            from megatron_scalerl.prompts.tokenizer import load_tokenizer

            # The cache has room for several tool lists, since requests of an agent may have different tools.
            self._talk = lru_cache(TOOL_SETS)(partial(turns_of, load_tokenizer(setup.policy)))

    def __call__(self, head: bytes, body: bytes) -> Answer:
        """The reply to a request, and the bytes that follow the reply."""
        try:
            request = self._request.decode(head)
            if request.messages:
                return self._rendered(request)
        except (ValueError, RecursionError) as error:
            return Answer(head=Reply(error=str(error)))
        try:
            arrays = completion(body, plan=request.plan, seed=request.seed, source=request.where)
        except EngineError as error:
            return Answer(head=Reply(error=str(error)))
        except CompletionLost as lost:
            return Answer(head=Reply(lost=str(lost), lost_reason=lost.reason))
        text = None
        before_calls = ""
        calls: tuple[ToolCall, ...] = ()
        answer_start = self._format.answer_start(arrays.token_ids) or 0
        # A truncated completion counts as wrong, so the text is not decoded.
        if not arrays.truncated:
            text = self._format.answer_text(arrays.token_ids, self._text)
        if text is not None and request.talk is not None:
            _, read = self._talk(request.talk)
            before_calls, calls = read(arrays.token_ids[answer_start:].tolist())
        decoded = Decoded(
            completion=facts_of(arrays),
            text=text,
            tool_calls=calls,
            before_calls=before_calls,
            answer_start=answer_start,
        )
        return Answer(head=Reply(decoded=decoded), body=write(arrays))

    def _rendered(self, request: Request) -> Answer:
        """The new tokens of a request's messages. Raises ValueError, or RecursionError for deeply nested JSON."""
        renderer, _ = self._talk(request.talk)
        ids, rewritten = renderer.next(request.messages, request.turns)
        return Answer(head=Reply(rewritten=rewritten), body=np.array(ids, dtype="<u4").tobytes())


def turns_of(tokenizer: Any, turns: TurnSettings) -> tuple[TurnRenderer, ToolParser]:
    """(renderer of turns, parser of the tool calls in the policy's turns).

    Raises ValueError as `TurnRenderer` and `tool_parser` do, and if there are tools but no chat template.
    """
    prompts = PromptsSection.model_validate_json(turns.prompts)
    tools = msgspec.json.decode(turns.tools)
    if tools and not prompts.chat_template:
        raise ValueError("environment: tools need prompts.chat_template true, since the template shows the tools")
    parser = tool_parser(tokenizer, tools, turns.end_ids)
    renderer = TurnRenderer(tokenizer, prompts, end_ids=turns.end_ids, tools=tools, thinking=turns.thinking)
    return renderer, parser


def _text_decoder(setup: Setup) -> Callable[[Sequence[int]], str]:
    """A function that decodes token ids to text, with special tokens and every space."""
    if setup.tokenizer is not None:
        from tokenizers import Tokenizer

        fast = Tokenizer.from_str(setup.tokenizer)
        return lambda ids: str(fast.decode(ids, skip_special_tokens=False))
    # `prompts.tokenizer` imports transformers, which takes seconds.
    from megatron_scalerl.prompts.tokenizer import load_tokenizer

    slow = load_tokenizer(setup.policy)
    return lambda ids: str(slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def main() -> None:
    """Decode until the controller ends this process."""
    # SIGINT and SIGTERM are ignored: the controller gets the same signals, and may still need decoded completions.
    ignore_signals()
    serve(Decoding)


if __name__ == "__main__":
    main()

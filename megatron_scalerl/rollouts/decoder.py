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
"""Number of sets of tools for which a process keeps a renderer."""


@record
class AnswerFormat:
    """The rule by which the answer of a completion is found. Produced by `rollouts.plans`."""

    plan: Plan | None
    """An interruption plan of the run. All plans have the same closing tag of thinking; None for a policy without
    tags."""
    think_end: str
    """The closing tag as text."""
    hidden_ids: frozenset[int]
    """Tokens that are not part of the text: special tokens and tokens that end a completion."""

    def answer_start(self, token_ids: np.ndarray) -> int | None:
        """Index of the first token after thinking in `token_ids` [T]; None if thinking did not end."""
        return 0 if self.plan is None else self.plan.thinking_end(token_ids)

    def answer_text(self, token_ids: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str | None:
        """The text after thinking, the whole text of a policy without tags; None if thinking did not end.

        token_ids: [T] the completion. decode: token ids to text, special tokens included.
        """
        start = self.answer_start(token_ids)
        if start is None:
            return None
        if self.plan is not None:
            # The tag's tokens may include neighboring text, so they are decoded and the tag is cut off as text.
            start -= len(self.plan.think_end_ids)
        text = decode([token for token in token_ids[start:].tolist() if token not in self.hidden_ids])
        if self.plan is None:
            return text
        return extract_answer(text, self.think_end)


@record
class TurnSettings:
    """The settings of `prompts.turns.TurnRenderer` and of the parser of tool calls."""

    prompts: str
    """The recipe's section, settled, as JSON."""
    end_ids: tuple[int, ...]
    thinking: Literal["keep", "strip"]
    tools: str = "[]"
    """Tools that the template shows and whose calls are read, as JSON."""


@record
class Setup:
    """The settings of all jobs of a run."""

    answer: AnswerFormat
    tokenizer: str | None
    """tokenizer.json of the policy; None without this file: transformers then loads the tokenizer from `policy`."""
    policy: str
    """Hugging Face folder of the policy."""
    episodes: bool = False
    """Whether there are requests with `talk`."""


@record
class Request:
    """A response to decode, whose body follows; if there are messages, messages to render as tokens."""

    plan: Plan | None = None
    """The response's interruption plan."""
    seed: int = 0
    """The number drawn for the completion."""
    where: str = ""
    """Engine and path, for errors."""
    messages: tuple[tuple[Message, ...], ...] = ()
    """[turns + 1] the environment's messages before each turn."""
    turns: tuple[PastTurn, ...] = ()
    talk: TurnSettings | None = None
    """The task's settings of turns; None: a single turn."""


@record
class Decoded:
    """A completion. Produced by `rollouts.decoder_pool`."""

    completion: Completion
    data: bytes = b""
    """`batching.rollout_bytes.write` of the completion; empty in a Reply."""
    text: str | None
    """Text after thinking; None if thinking did not end or the completion is truncated."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of tools in the text."""
    before_calls: str = ""
    """The text before the first call."""
    answer_start: int = 0
    """Index of the first token after thinking; 0 without tags, or if thinking did not end."""


@record
class Reply:
    """The result of a request; without an error, bytes of the completion or tokens of the messages follow."""

    decoded: Decoded | None = None
    error: str = ""
    """Message of an EngineError, or of a ValueError for messages that cannot be rendered."""
    lost: str = ""
    """Message of a CompletionLost."""
    lost_reason: str = ""
    rewritten: bool = False
    """True if the tokens are the whole context; False if the tokens are appended to the context."""


class Decoding:
    """Answers requests."""

    def __init__(self, setup_json: bytes):
        setup = msgspec.json.decode(setup_json, type=Setup)
        self._format = setup.answer
        self._text = _text_decoder(setup)
        self._request = msgspec.json.Decoder(Request)
        if setup.episodes:
            # This module imports transformers, which takes seconds.
            from megatron_scalerl.prompts.tokenizer import load_tokenizer

            # Every request of an agent may have different tools.
            self._talk = lru_cache(TOOL_SETS)(partial(turns_of, load_tokenizer(setup.policy)))

    def __call__(self, head: bytes, body: bytes) -> Answer:
        """The reply to a request, with the reply's bytes."""
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
        # A truncated completion counts as wrong, whatever the text says.
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
        """The tokens of a request's messages. Raises ValueError, and RecursionError for nested messages and tools."""
        renderer, _ = self._talk(request.talk)
        ids, rewritten = renderer.next(request.messages, request.turns)
        return Answer(head=Reply(rewritten=rewritten), body=np.array(ids, dtype="<u4").tobytes())


def turns_of(tokenizer: Any, turns: TurnSettings) -> tuple[TurnRenderer, ToolParser]:
    """(renderer of the turns, parser of calls of tools in the turns).

    Raises ValueError as both do, and for tools that no template shows.
    """
    prompts = PromptsSection.model_validate_json(turns.prompts)
    tools = msgspec.json.decode(turns.tools)
    if tools and not prompts.chat_template:
        raise ValueError("environment: tools need prompts.chat_template true, since the template shows them")
    parser = tool_parser(tokenizer, tools, turns.end_ids)
    renderer = TurnRenderer(tokenizer, prompts, end_ids=turns.end_ids, tools=tools, thinking=turns.thinking)
    return renderer, parser


def _text_decoder(setup: Setup) -> Callable[[Sequence[int]], str]:
    """A function that decodes token ids to text, with special tokens and every space."""
    if setup.tokenizer is not None:
        from tokenizers import Tokenizer

        fast = Tokenizer.from_str(setup.tokenizer)
        return lambda ids: str(fast.decode(ids, skip_special_tokens=False))
    # This module imports transformers, which takes seconds.
    from megatron_scalerl.prompts.tokenizer import load_tokenizer

    slow = load_tokenizer(setup.policy)
    return lambda ids: str(slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def main() -> None:
    """Decode until the controller ends this process."""
    # Signals to the whole process group are left to the controller, which may still need completions to save.
    ignore_signals()
    serve(Decoding)


if __name__ == "__main__":
    main()

"""A decoder process: `python -m megatron_scalerl.rollouts.decoder`, started and killed by `rollouts.decoder_pool`.

It turns the responses of engines into completions: bytes for the store (`batching.rollout_bytes`), facts for the
controller, text and calls of tools for verifier and environment. It renders the messages of environments as tokens.
Its frames (`processes.worker`):

    setup      Setup
    request    Request to decode, body of the response
    reply      Reply, bytes of the completion
    request    Request to render messages
    reply      Reply, tokens as u32

Without turns to render it imports no torch, and no transformers where the policy's tokenizer is one of the package
`tokenizers`.
"""

import signal
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import msgspec
import numpy as np

from megatron_scalerl.batching.rollout_bytes import facts_of, write
from megatron_scalerl.engine.answers import EngineError, completion
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.environments.response import Message, ToolCall
from megatron_scalerl.processes.worker import Answer, serve
from megatron_scalerl.prompts.turns import PastTurn, TurnRenderer
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.record import record
from megatron_scalerl.rewards.math import extract_answer
from megatron_scalerl.rollouts.tool_calls import ToolParser, tool_parser
from megatron_scalerl.types import Completion, CompletionLost

TOOL_SETS = 16
"""Sets of tools for which a process keeps a renderer."""


@record
class AnswerFormat:
    """The rule by which the answer of a completion is found. Produced by `rollouts.plans`."""

    plan: Plan | None
    """Any interruption plan of the run: its closing tag ends thinking. None for a policy that thinks in no tags."""
    think_end: str
    """The closing tag as text."""
    hidden_ids: frozenset[int]
    """Tokens that are not part of the text: special tokens and those that end a completion."""

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
            # the tag's tokens may include neighboring text, so decode them too and cut the tag off as text
            start -= len(self.plan.think_end_ids)
        text = decode([token for token in token_ids[start:].tolist() if token not in self.hidden_ids])
        if self.plan is None:
            return text
        return extract_answer(text, self.think_end)


@record
class TurnSettings:
    """What `prompts.turns.TurnRenderer` needs."""

    prompts: str
    """The recipe's section, settled, as JSON."""
    end_ids: tuple[int, ...]
    thinking: Literal["keep", "strip"]
    tools: str = "[]"
    """Those that the template shows and whose calls are read, as JSON."""


@record
class Setup:
    """The settings of all jobs of a run."""

    answer: AnswerFormat
    tokenizer: str | None
    """tokenizer.json of the policy; None if it has none: transformers then loads the tokenizer from `policy`."""
    policy: str
    """Hugging Face folder of the policy."""
    episodes: bool = False
    """Whether there are requests with `talk`."""


@record
class Request:
    """A response to decode, whose body follows; or messages to render as tokens, if there are any."""

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
    """Of the task; None: a single turn."""


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
    """The result of a request; the bytes of the completion or the tokens of the messages follow, if there are any."""

    decoded: Decoded | None = None
    error: str = ""
    """Message of an EngineError, or of a ValueError for messages that cannot be rendered."""
    lost: str = ""
    """Message of a CompletionLost."""
    lost_reason: str = ""
    rewritten: bool = False
    """The tokens are the whole context; else they are appended to it."""


class Decoding:
    """Answers requests."""

    def __init__(self, setup_json: bytes):
        setup = msgspec.json.decode(setup_json, type=Setup)
        self._format = setup.answer
        self._text = _text_decoder(setup)
        self._request = msgspec.json.Decoder(Request)
        if setup.episodes:
            from megatron_scalerl.prompts.tokenizer import load_tokenizer  # imports transformers

            # agents choose their tools
            self._talk = lru_cache(TOOL_SETS)(partial(turns_of, load_tokenizer(setup.policy)))

    def __call__(self, head: bytes, body: bytes) -> Answer:
        """The reply to a request and its bytes."""
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
        if not arrays.truncated:  # a truncated completion counts as wrong, whatever it says
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
        """Raises ValueError, and RecursionError for nested messages and tools."""
        renderer, _ = self._talk(request.talk)
        ids, rewritten = renderer.next(request.messages, request.turns)
        return Answer(head=Reply(rewritten=rewritten), body=np.array(ids, dtype="<u4").tobytes())


def turns_of(tokenizer: Any, turns: TurnSettings) -> tuple[TurnRenderer, ToolParser]:
    """(renderer of the turns, parser of their calls of tools). Raises ValueError as both, and for tools that no
    template shows."""
    prompts = PromptsSection.model_validate_json(turns.prompts)
    tools = msgspec.json.decode(turns.tools)
    if tools and not prompts.chat_template:
        raise ValueError("environment: tools need prompts.chat_template true, since the template shows them")
    parser = tool_parser(tokenizer, tools, turns.end_ids)
    renderer = TurnRenderer(tokenizer, prompts, end_ids=turns.end_ids, tools=tools, thinking=turns.thinking)
    return renderer, parser


def _text_decoder(setup: Setup) -> Callable[[Sequence[int]], str]:
    """Token ids to text: all tokens, with every space."""
    if setup.tokenizer is not None:
        from tokenizers import Tokenizer

        fast = Tokenizer.from_str(setup.tokenizer)
        return lambda ids: str(fast.decode(ids, skip_special_tokens=False))
    from megatron_scalerl.prompts.tokenizer import load_tokenizer  # imports transformers

    slow = load_tokenizer(setup.policy)
    return lambda ids: str(slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def main() -> None:
    """Decode until the controller ends this process."""
    # signals to the whole group are the controller's: it may still need completions to save
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve(Decoding)


if __name__ == "__main__":
    main()

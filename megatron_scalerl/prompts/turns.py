"""Renders the turns of an episode as tokens: what the policy has sampled is never decoded and encoded again.

    messages --marks--> chat template --split--> texts between turns --encode--> ids, joined with the policy's

The context of an episode: `first` renders the messages before the first turn. After each turn `next` gives the tokens
to append: the end of the turn where the policy did not sample it, the new messages, the opening of the next turn.
Where the recipe strips thinking and the template drops some that is in the context, `next` gives a whole new context.

To find the texts between turns, a conversation is rendered with stand-ins for thoughts and answers of the policy. The
same messages have to come out of a short conversation as well: else the template would have rendered the context
differently, had it seen all of it.

Messages come from an untrusted environment. A mark after the first character of a special token in them splits the
text there when it is encoded, so that the policy reads its characters. Stand-ins and marks have a random key, which
is in no other text.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, dropwhile
from typing import Any, Literal

import numpy as np

from megatron_scalerl.prompts.chat import NO_TAGS, QUESTION, Messages, apply_template, tags_in
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.record import record

OUTPUT = {"role": "tool", "content": "2", "name": "f", "tool_call_id": "123456789"}
"""A tool's message that shows what a template makes of it."""


@record
class PastTurn:
    """A turn of the policy. Produced by `rollouts.episodes`."""

    token_ids: np.ndarray
    """[T] sampled and forced tokens."""
    answer_start: int
    """Index of the first token after thinking; 0 if thinking did not end, or the policy thinks in no tags."""


class TurnRenderer:
    """Renders the messages of an environment between the turns of the policy.

    tokenizer: of Hugging Face. prompts: settled (`prompts.chat`). end_ids: tokens that end a completion. tools: JSON
    schemas of functions. thinking: the recipe's `environment.thinking`. Raises ValueError as `PromptRenderer`, for a
    template that cannot have several turns, and for tools that no template shows.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompts: PromptsSection,
        *,
        end_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: Literal["keep", "strip"],
    ):
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._prompt = PromptRenderer(tokenizer, prompts)
        self._end_ids = frozenset(end_ids)
        self._tools = tools
        self._thinks = bool(prompts.think_end.strip())
        self._strips = self._thinks and thinking == "strip"
        self._key = secrets.token_hex(16)
        self._mark = f"{self._key};"
        self._apart = False
        source = tokenizer.get_chat_template(tools=tools) if prompts.chat_template else ""
        added = (token.content for token in tokenizer.added_tokens_decoder.values())
        # role tokens of some tokenizers are not called special
        words = self._prompt.special.union(word for word in added if word.strip() and word in source)
        self._words = re.compile(f"(?={'|'.join(map(re.escape, words))}).", re.DOTALL)
        if prompts.chat_template:
            self._measure(source)
        elif tools:
            raise ValueError("environment: tools need prompts.chat_template true, since the template shows them")

    def first(self, messages: Messages) -> list[int]:
        """[P] tokens of the messages before the first turn, and the opening of that turn."""
        if self._prompts.chat_template:
            [text] = self._pieces([messages])
        else:
            text = self._plain(messages)
        return list(self._prompt.with_bos(self._encode(text)))

    def next(self, messages: Sequence[Messages], turns: Sequence[PastTurn]) -> tuple[list[int], bool]:
        """(tokens, whether they are the whole context; else they are appended to it).

        messages: [turns + 1] lists, each before a turn, the last one new. turns: at least one. Raises ValueError for
        a template that fails, or renders the new messages differently by what came before.
        """
        if not self._prompts.chat_template:
            return self._encode(self._plain(messages[-1])), False
        pieces = self._pieces(messages)
        if self._pieces([[QUESTION], messages[-1]])[-1] != pieces[-1]:
            raise ValueError(
                f"prompts.chat_template: the tokenizer's template renders the messages before turn {len(turns) + 1} "
                "differently by what came before them, so they cannot follow what the policy has seen; mend the "
                "template, or set prompts.chat_template false"
            )
        kept = _kept(pieces)
        if not self._strips or not self._drops(messages, kept):
            return self._after(pieces[-1], turns[-1].token_ids.tolist()), False
        context = list(self._prompt.with_bos(self._encode(pieces[0])))
        for turn, whole, text in zip(turns, kept, pieces[2::2]):
            ids = turn.token_ids.tolist() if whole else self._answer(turn)
            context += ids + self._after(text, ids)
        return context, True

    def _drops(self, messages: Sequence[Messages], kept: Sequence[bool]) -> bool:
        """Whether the context has a thought that is not kept."""
        # it has those that the template left in it before the last turn, and that turn's
        before = [*_kept(self._pieces(messages[:-1])), True]
        return any(had and not keeps for had, keeps in zip(before, kept))

    def _measure(self, source: str) -> None:
        """Find how the template takes thoughts, and try it with two turns."""
        shown = apply_template(self._tokenizer, self._prompts, [QUESTION])
        if self._tools and shown == apply_template(self._tokenizer, self._prompts, [QUESTION], tools=self._tools):
            raise ValueError("environment: the tokenizer's chat template does not show the tools")
        bare = apply_template(self._tokenizer, self._prompts, [QUESTION], generation=False)
        self._opening = self._prompt.prefilled(shown).removeprefix(bare)
        tag, _ = tags_in(source) or NO_TAGS
        opening = re.escape(self._opening.strip())
        self._before_thought = re.compile(rf"(.*){opening}\s*({re.escape(tag)})?\s*", re.DOTALL)
        turn = PastTurn(token_ids=np.array([*self._end_ids][:1]), answer_start=0)
        new = [OUTPUT if self._tools else QUESTION]
        try:
            self.next([[QUESTION], new, new], [turn, turn])
        except ValueError as error:
            self._apart = True
            with suppress(ValueError):
                self.next([[QUESTION], new, new], [turn, turn])
                return
            raise error

    def _plain(self, messages: Messages) -> str:
        """Messages without a template."""
        texts = "".join(str(message["content"]) for message in messages)
        return self._prompt.prefilled(self._marked(texts))

    def _pieces(self, messages: Sequence[Messages]) -> list[str]:
        """[text, turn, text, ..., text] of a conversation.

        A turn is its number, after a "w" if it is the whole turn, and an "a" if it is the answer.
        """
        key = self._key
        conversation = list(self._prompt.with_system(self._marked(messages[0])))
        for number, new in enumerate(messages[1:]):
            conversation += [self._stand_in(number), *self._marked(new)]
        text = apply_template(self._tokenizer, self._prompts, conversation, tools=self._tools)
        text = re.sub(rf"{key}t(\d+);.*?{key}a\1;", rf"{key}w\1;", self._prompt.prefilled(text), flags=re.DOTALL)
        pieces = re.split(rf"{key}([atw]\d+);", text)
        if [turn.lstrip("aw") for turn in pieces[1::2]] != [str(number) for number in range(len(messages) - 1)]:
            raise ValueError("prompts.chat_template: the tokenizer's template moves, repeats or drops answers")
        for index, whole in enumerate(_kept(pieces)):
            if whole:
                pieces[2 * index] = self._opened(pieces[2 * index])
        return pieces

    def _stand_in(self, number: int) -> dict[str, str]:
        """The message of a turn."""
        thought = f"{self._key}t{number};"
        answer = f"{self._key}a{number};"
        if self._apart:
            return {"role": "assistant", "content": answer, "reasoning_content": thought}
        if self._thinks:
            answer = f"{self._prompts.think_start}{thought}{self._prompts.think_end}\n\n{answer}"
        return {"role": "assistant", "content": answer}

    def _opened(self, text: str) -> str:
        """The text before a thought, with the opening of the turn as the policy has seen it."""
        match = self._before_thought.fullmatch(text)
        if match is None:
            raise ValueError(
                "prompts.chat_template: the tokenizer's template opens earlier turns of the assistant not as the "
                f"prompt, which ends with {self._opening!r}"
            )
        return match[1] + self._opening.lstrip()

    def _after(self, text: str, ids: Sequence[int]) -> list[int]:
        """The tokens of a text that follows a turn, whose tokens are `ids`."""
        after = self._encode(text.lstrip())
        if not self._end_ids.intersection(after[:1]):
            raise ValueError(
                f"prompts.chat_template: the tokenizer's template continues an answer with {text[:20]!r}, which is "
                f"none of the policy's end tokens {sorted(self._end_ids)}"
            )
        return after[1:] if ids[-1:] == after[:1] else after

    def _answer(self, turn: PastTurn) -> list[int]:
        """[A] tokens of a turn without thinking and white space after it; none if thinking did not end."""
        start = turn.answer_start or len(turn.token_ids)
        ids = turn.token_ids[start:].tolist()
        return list(dropwhile(lambda token: not self._tokenizer.decode([token]).strip(), ids))

    def _marked(self, value: Any) -> Any:
        """A value of a message with a mark in each special token."""
        if isinstance(value, str):
            return self._words.sub(rf"\g<0>{self._mark}", value)
        if isinstance(value, Mapping):
            return {name: self._marked(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(part) for part in value]
        return value

    def _encode(self, text: str) -> list[int]:
        """Tokens of a text, which is split at the marks."""
        parts = self._tokenizer(text.split(self._mark), add_special_tokens=False)["input_ids"]
        return list(chain.from_iterable(parts))


def _kept(pieces: Sequence[str]) -> list[bool]:
    """[turns] whether a thought is in the text."""
    return [turn.startswith("w") for turn in pieces[1::2]]

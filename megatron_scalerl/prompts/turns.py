"""Rendering of an episode's turns as tokens: sampled tokens are never decoded and encoded again.

    messages --marks--> chat template --split--> texts between turns --encode--> ids, joined with the policy's

The context of an episode: `first` renders the messages before the first turn. After each turn `next` gives the tokens
to append: the end of the turn if the policy did not sample the end, the new messages, the opening of the next turn.
If environment.thinking is strip, and the template drops thinking that is in the context, `next` gives a whole new
context.

To find the texts between turns, the template renders the conversation with stand-ins for the policy's answers, and
for thoughts that the template may drop. The text for the newest messages has to be the same after a single question:
else the text depends on earlier messages, and cannot be appended.

Messages come from an untrusted environment. If a message has the text of a special token, a mark after the first
character splits the text before encoding, so that the policy reads characters, not the token. Stand-ins and marks
contain a random key, so that no message can imitate one.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain, dropwhile
from typing import Any, Literal

from megatron_scalerl.prompts.chat import NO_TAGS, QUESTION, Messages, apply_template, tags_in
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.record import record

OUTPUT = {"role": "tool", "content": "2", "name": "f", "tool_call_id": "123456789"}
"""A sample message of a tool, to try a template with."""


@record
class PastTurn:
    """A finished turn of the policy. Produced by `rollouts.episodes`."""

    token_ids: tuple[int, ...]
    """[T] sampled and forced tokens."""
    answer_start: int
    """Index of the first token after thinking; 0 if thinking did not end, or the policy thinks in no tags."""


class TurnRenderer:
    """Renders the messages of an environment between the turns of the policy.

    tokenizer: Hugging Face's. prompts: without `auto` (`Chat.settled`). end_ids: tokens that end a completion. tools:
    JSON schemas of functions, for a chat template. thinking: the recipe's `environment.thinking`. Raises ValueError
    as `PromptRenderer`, and for a template that cannot have several turns.
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
        self._strips = thinking == "strip" and bool(prompts.think_end.strip())
        self._key = secrets.token_hex(16)
        self._mark = f"{self._key};"
        source = tokenizer.get_chat_template(tools=tools or None) if prompts.chat_template else ""
        added_tokens = (token.content for token in tokenizer.added_tokens_decoder.values())
        # some tokenizers do not list the tokens of roles as special, so added tokens in the template count too
        words = self._prompt.special.union(word for word in added_tokens if word.strip() and word in source)
        self._words = re.compile(f"(?={'|'.join(map(re.escape, words))}).", re.DOTALL)
        self._tools = self._with_marks(tools)
        if prompts.chat_template:
            self._measure(source)

    def _measure(self, source: str) -> None:
        """Find the text with which the template opens a turn, and render two turns as a test. Raises ValueError as
        `next`."""
        sample_prompt = apply_template(self._tokenizer, self._prompts, [QUESTION])
        sample_messages = apply_template(self._tokenizer, self._prompts, [QUESTION], generation=False)
        self._opening = self._prompt.prefilled(sample_prompt).removeprefix(sample_messages).lstrip()
        self._tag, _ = tags_in(source) or NO_TAGS
        turn = PastTurn(token_ids=(min(self._end_ids),), answer_start=0)
        new = [OUTPUT if self._tools else QUESTION]
        self.next([[QUESTION], new, new], [turn, turn])

    def first(self, messages: Messages) -> list[int]:
        """Tokens [P] of the messages before the first turn, and of the text that opens the turn."""
        return self._first_tokens(self._pieces([messages])[0])

    def next(self, messages: Sequence[Messages], turns: Sequence[PastTurn]) -> tuple[list[int], bool]:
        """Return (tokens, whether the tokens are the whole context). If not, the caller appends the tokens to the
        context.

        messages: turns + 1 lists: the messages before each past turn, and the new messages. Raises ValueError for a
        template that fails, or whose text for the new messages depends on earlier messages.
        """
        if not turns:
            return self.first(messages[0]), False
        if not self._prompts.chat_template:
            return self._encode(self._pieces(messages[-1:])[0]), False
        pieces = self._pieces(messages)
        turn_names = pieces[1::2]
        if self._pieces([[QUESTION], messages[-1]])[-1] != pieces[-1]:
            raise ValueError(
                f"prompts.chat_template: the tokenizer's template renders the messages before turn {len(turns) + 1} "
                "differently after other messages, so the text cannot be appended to the context; correct the "
                "template, or set prompts.chat_template false"
            )
        # no new context if the template still shows the last turn as a whole, and earlier turns as in the last call
        if not self._strips or {*self._pieces(messages[:-1])[1::2], f"w{len(turns) - 1}"} <= set(turn_names):
            return self._next_tokens(pieces[-1], list(turns[-1].token_ids)), False
        context = self._first_tokens(pieces[0])
        for turn, name, text in zip(turns, turn_names, pieces[2::2]):
            ids = list(turn.token_ids)
            if name.startswith("a"):
                # only the answer's tokens stay, without white space at the start; none if thinking did not end
                answer = ids[turn.answer_start or len(ids) :]
                ids = list(dropwhile(lambda token: not self._tokenizer.decode([token]).strip(), answer))
            context += ids + self._next_tokens(text, ids)
        return context, True

    def _pieces(self, messages: Sequence[Messages]) -> list[str]:
        """A conversation as [text, turn, text, ..., text].

        A turn of the policy is a letter, "w" (whole turn) or "a" (answer without thinking), and the turn's number
        from 0.
        """
        if not self._prompts.chat_template:
            text = "".join(str(message["content"]) for message in messages[0])
            return [self._prompt.prefilled(self._with_marks(text))]
        marked_messages = [self._with_marks(new) for new in messages]
        conversation = list(marked_messages[0])
        if all(message["role"] != "system" for message in conversation):
            conversation = list(self._prompt.with_system(conversation))
        for number, new in enumerate(marked_messages[1:]):
            content = f"{self._key}a{number};"
            if self._strips:
                thought = f"{self._prompts.think_start}{self._key}t{number};{self._prompts.think_end}"
                content = f"{thought}\n\n{content}"
            conversation += [{"role": "assistant", "content": content}, *new]
        text = apply_template(self._tokenizer, self._prompts, conversation, tools=self._tools)
        first, *remaining_parts = re.split(rf"{self._key}([at]\d+);", self._prompt.prefilled(text))
        pieces = [first]
        while remaining_parts:
            name, text, *remaining_parts = remaining_parts
            if name.startswith("t") and remaining_parts:
                # a thought directly before the answer's stand-in is a whole turn; the template may strip the
                # opening's line end, or add the think tag
                opening = self._opening.rstrip()
                text_before = pieces[-1].rstrip()
                if not text_before.endswith(opening):
                    text_before = text_before.removesuffix(self._tag.rstrip()).rstrip()
                if remaining_parts[0] == f"a{name[1:]}" and text_before.endswith(opening):
                    pieces[-1] = text_before.removesuffix(opening) + self._opening
                    name = f"w{name[1:]}"
                    _, text, *remaining_parts = remaining_parts
            pieces += [name, text]
        if [name.lstrip("aw") for name in pieces[1::2]] != [str(number) for number in range(len(messages) - 1)]:
            raise ValueError(
                "prompts.chat_template: the tokenizer's template moves, repeats or drops turns of the assistant, or "
                f"opens later turns differently from the first, which starts with {self._opening!r}"
            )
        return pieces

    def _with_marks(self, value: Any) -> Any:
        """A copy of a message or tool in which the mark splits the text of every special token."""
        if isinstance(value, str):
            return self._words.sub(rf"\g<0>{self._mark}", value)
        if isinstance(value, Mapping):
            return {self._with_marks(name): self._with_marks(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._with_marks(item) for item in value]
        return value

    def _first_tokens(self, text: str) -> list[int]:
        """The tokens of the text that begins a context, after a beginning-of-sequence token if prompts.add_bos is
        set."""
        return list(self._prompt.with_bos(self._encode(text)))

    def _next_tokens(self, text: str, ids: Sequence[int]) -> list[int]:
        """The tokens of the text that follows a turn with the tokens `ids`, without the end of the turn if `ids` has
        the end."""
        tokens = self._encode(text.lstrip())
        if not self._end_ids.intersection(tokens[:1]):
            raise ValueError(
                f"prompts.chat_template: the tokenizer's template continues an answer with {text[:20]!r}, which is "
                f"none of the policy's end tokens {sorted(self._end_ids)}; add it to eos_token_id in "
                "generation_config.json"
            )
        return tokens[1:] if ids[-1:] == tokens[:1] else tokens

    def _encode(self, text: str) -> list[int]:
        """Encode the pieces between the marks (`_with_marks`) separately, and leave the marks out."""
        parts = self._tokenizer(text.split(self._mark), add_special_tokens=False)["input_ids"]
        return list(chain.from_iterable(parts))

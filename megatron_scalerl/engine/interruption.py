"""Forced interruption of thinking: the cut, the token to force next, and the tokens that were forced.

Khatri et al. 2025, arXiv 2510.13786, section 2 ("Forced interruptions"): a completion that is still thinking
after a random number of tokens gets a phrase that ends thinking, and then a budget for the answer.

Two processes apply the same rules: `Forcing` in vLLM's workers while a completion grows (O(1) per token), and `tag`
in a decoder process on the finished completion. Both depend on tokens and plan alone, and so agree, as a test checks.

    natural end   the whole closing tag is within the first `cut` tokens
    forced end    otherwise, after `cut` tokens: `phrase_ids` follow, one after another
    answer        after a forced end at most `answer_budget` tokens; after a natural end until the completion
                  has `whole_budget` tokens; then `eos_id` is forced: truncated

Choices where the paper is silent: the forced end of sequence, which was not sampled, is removed again, and a closing
tag that only a forced token completes is not a natural end.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from megatron_scalerl.record import record

_EXTRA_ARG = "msrl_interruption"
"""Key of an interruption plan in a request's `sampling_params.extra_args`."""


def draw_cut(seed: int, group_id: int, index: int, lower_bound: int, upper_bound: int) -> int:
    """Draw the number of thinking tokens after which a completion is interrupted, uniform between the two bounds.

    The number may equal either bound. Equal arguments give an equal number.
    """
    return random.Random(f"cut/{seed}/{group_id}/{index}").randint(lower_bound, upper_bound)


@record
class Plan:
    """The interruption plan of one completion: which tokens may be forced, and where."""

    cut: int
    """Number of thinking tokens after which the phrase is forced, at least 1."""
    phrase_ids: tuple[int, ...]
    """Token ids of the forced phrase, which ends with the closing tag."""
    think_end_ids: tuple[int, ...]
    """Token ids of the closing tag of thinking, at least one id."""
    think_end_first: frozenset[int] = frozenset()
    """Ids of tokens that count as the tag's first token, but contain text before the tag, too (`tag_variants`)."""
    think_end_last: frozenset[int] = frozenset()
    """Ids of tokens that count as the tag's last token, but contain text after the tag, too (`tag_variants`)."""
    answer_budget: int
    """Largest number of tokens after a forced end of thinking, the policy's end of sequence included."""
    whole_budget: int | None = None
    """Largest number of tokens of a completion whose thinking ended naturally, at least `cut + answer_budget`.

    Thinking is included. None: at most `answer_budget` tokens follow the tag, as after a forced end.
    """
    eos_id: int
    """Id of the token that ends a sequence."""

    def __post_init__(self) -> None:
        # The recipe and `plan_ids` have refused mistakes of a user: a failure here is a defect of this package.
        assert self.cut >= 1 and self.answer_budget >= 1, self
        assert self.ends_thinking(self.phrase_ids, len(self.phrase_ids)), self

    def ends_thinking(self, tokens: Sequence[int] | np.ndarray, end: int) -> bool:
        """True if the last tokens before index `end` are the closing tag."""
        return _closes(tokens, end, self.think_end_ids, self.think_end_first, self.think_end_last)

    def thinking_end(self, tokens: np.ndarray) -> int | None:
        """Index after the first closing tag in `tokens` [T]; None if there is no tag."""
        ends = np.flatnonzero(np.isin(tokens, (self.think_end_ids[-1], *self.think_end_last))) + 1
        return next((end for end in ends.tolist() if self.ends_thinking(tokens, end)), None)

    def budget_end(self, answer_start: int, *, forced: bool) -> int:
        """Index in the completion at which the end of sequence is forced.

        answer_start: index of the first token after thinking. forced: whether the phrase ended thinking.
        """
        if forced or self.whole_budget is None:
            return answer_start + self.answer_budget
        return self.whole_budget

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of a completion under this plan, the forced end of sequence included.

        `Recipe.longest_sequence` takes the largest number of all plans of a run into account.
        """
        interrupted = self.cut + len(self.phrase_ids) + self.answer_budget
        return max(interrupted, self.whole_budget or 0) + 1

    def to_extra_args(self) -> dict[str, Any]:
        """The plan as JSON data for `sampling_params.extra_args`."""
        return {_EXTRA_ARG: msgspec.to_builtins(self)}

    @classmethod
    def from_extra_args(cls, extra: dict[str, Any] | None) -> "Plan | None":
        """The plan in a request's extra arguments; None if there is no plan.

        Raises ValueError for an invalid plan.
        """
        if not extra or _EXTRA_ARG not in extra:
            return None
        try:
            return msgspec.convert(extra[_EXTRA_ARG], cls)
        except msgspec.ValidationError as err:
            raise ValueError(f"extra_args: {extra} is not an interruption plan ({err})") from None


def plan_ids(tokenizer: Any, phrase: str, think_end: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(token ids of `phrase + think_end`, token ids of `think_end`) in a Hugging Face tokenizer.

    Phrase and tag are encoded together, as in the examples of a warm start: Llama 3 merges the space before the tag
    and the tag's first characters into one token. If the common encoding loses a space, as before a tag that is an
    added token with `lstrip`, each text is encoded alone. Raises ValueError if neither encoding decodes to the text.
    """
    end_ids = _encode(tokenizer, think_end)
    if not end_ids:
        raise ValueError(f"prompts.think_end: {think_end!r} has no tokens; set a tag with at least one token")
    back = _decode(tokenizer, end_ids)
    if back.strip() != think_end.strip():
        raise ValueError(f"prompts.think_end: encoding and decoding turn {think_end!r} into {back!r}; set another")
    first, last = tag_variants(tokenizer, end_ids)
    text = phrase + think_end
    text_ids = _encode(tokenizer, text)
    for ids in (text_ids, _encode(tokenizer, phrase) + end_ids):
        if _decode(tokenizer, ids) == text and _closes(ids, len(ids), end_ids, first, last):
            return ids, end_ids
    raise ValueError(
        f"interruption.phrase: encoding and decoding turn the phrase with the closing tag, {text!r}, into "
        f"{_decode(tokenizer, text_ids)!r}; choose another phrase"
    )


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if not text:
        return ()
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _closes(
    tokens: Sequence[int] | np.ndarray,
    end: int,
    tag_ids: tuple[int, ...],
    first: frozenset[int],
    last: frozenset[int],
) -> bool:
    """Whether the closing tag ends right before index `end`.

    first, last: tokens that are accepted in place of the tag's first and last token.
    """
    start = end - len(tag_ids)
    if start < 0 or (tokens[end - 1] != tag_ids[-1] and tokens[end - 1] not in last):
        return False
    return len(tag_ids) == 1 or (
        (tokens[start] == tag_ids[0] or tokens[start] in first)
        and tuple(tokens[start + 1 : end - 1]) == tag_ids[1:-1]
    )


def tag_variants(tokenizer: Any, think_end_ids: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """(token ids accepted in place of the tag's first token, token ids accepted in place of the tag's last token).

    A tag of several tokens may share a token with the text beside the tag: Llama 3 encodes the end of "</think>" and
    a blank line as one token, which is accepted in place of the tag's last token. If the tag's first or last token
    has letters, no variants are accepted, since a longer token would be a different word. The mark with which
    SentencePiece begins a text is no part of the tag.
    """
    if len(think_end_ids) < 2:
        return frozenset(), frozenset()
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    first = pieces[think_end_ids[0]].lstrip("\u2581")
    last = pieces[think_end_ids[-1]]
    first_variants: set[int] = set()
    last_variants: set[int] = set()
    if _is_mark(first):
        first_variants = {index for index, piece in enumerate(pieces) if piece and piece.endswith(first)}
    if _is_mark(last):
        last_variants = {index for index, piece in enumerate(pieces) if piece and piece.startswith(last)}
    return frozenset(first_variants - {think_end_ids[0]}), frozenset(last_variants - {think_end_ids[-1]})


def _is_mark(piece: str) -> bool:
    """Whether a token's text has no letters and no digits."""
    return bool(piece) and not any(character.isalnum() for character in piece)


class Forcing:
    """Says which token is forced next on a growing completion. The caller asks `next_token` before each new token.

    Each token is read only once, so a later call has to pass the same tokens and the tokens after them. The list may
    be a new object, as after a preemption or a pause.
    """

    __slots__ = ("_answer_start", "_budget_end", "_read", "plan")

    def __init__(self, plan: Plan):
        self.plan = plan
        self._read = 0
        self._answer_start = -1
        self._budget_end = -1

    def next_token(self, tokens: Sequence[int]) -> int | None:
        """The token that is forced next; None if the next token is sampled.

        tokens: [n] the completion so far, sampled and forced tokens.
        """
        plan = self.plan
        length = len(tokens)
        if self._answer_start < 0:
            self._read_thinking(tokens)
        if self._answer_start < 0 and length < plan.cut:
            return None
        if self._answer_start < 0 or length < self._answer_start:
            return plan.phrase_ids[length - plan.cut]
        return plan.eos_id if length >= self._budget_end else None

    def _read_thinking(self, tokens: Sequence[int]) -> None:
        plan = self.plan
        until = min(len(tokens), plan.cut)
        for end in range(self._read + 1, until + 1):
            if plan.ends_thinking(tokens, end):
                self._begin_answer(end, forced=False)
                return
        self._read = until
        if len(tokens) > plan.cut:
            self._begin_answer(plan.cut + len(plan.phrase_ids), forced=True)

    def _begin_answer(self, start: int, *, forced: bool) -> None:
        self._answer_start = start
        self._budget_end = self.plan.budget_end(start, forced=forced)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tags:
    """Which tokens of a finished completion were forced, and how the completion ended."""

    loss_mask: np.ndarray
    """[kept_length] bool, False for a forced token."""
    interrupted: bool
    """Whether thinking was interrupted, that is the phrase was forced."""
    truncated: bool
    """Whether a limit of tokens ended the completion before the policy did."""
    answer_start: int | None
    """Index of the first token after thinking; None if thinking did not end."""
    kept_length: int
    """Number of tokens of the completion, a forced end of sequence not counted."""


def tag(token_ids: Sequence[int] | np.ndarray, plan: Plan) -> Tags:
    """Find out which tokens of a finished completion were forced, and how the completion ended.

    token_ids: [T] the completion as returned by the engine, with a forced end of sequence. Raises ValueError if the
    engine did not force the plan's tokens: the engine lacks the plugin, or got a different plan.
    """
    tokens = np.asarray(token_ids)
    length = kept_length = len(tokens)
    answer_start = plan.thinking_end(tokens[: plan.cut])
    forced_until = plan.cut
    truncated = False
    if answer_start is None and length > plan.cut:
        forced_until = min(length, plan.cut + len(plan.phrase_ids))
        forced = tuple(tokens[plan.cut : forced_until].tolist())
        if forced != plan.phrase_ids[: len(forced)]:
            raise ValueError(f"completion tokens from {plan.cut} on: {forced} is not the forced phrase of the plan")
        truncated = len(forced) < len(plan.phrase_ids)
        if not truncated:
            answer_start = forced_until
    budget_end = length
    if answer_start is not None:
        budget_end = plan.budget_end(answer_start, forced=forced_until > plan.cut)
    if length > budget_end:
        kept_length = budget_end
        excess_ids = tuple(tokens[kept_length:].tolist())
        if excess_ids != (plan.eos_id,):
            raise ValueError(
                f"completion tokens from {kept_length}: {excess_ids} is not the forced end of sequence, {plan.eos_id}"
            )
        truncated = True
    loss_mask = np.ones(kept_length, dtype=bool)
    loss_mask[plan.cut : forced_until] = False
    return Tags(
        loss_mask=loss_mask,
        interrupted=forced_until > plan.cut,
        truncated=truncated,
        answer_start=answer_start,
        kept_length=kept_length,
    )

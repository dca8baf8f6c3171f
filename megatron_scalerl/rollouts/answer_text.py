"""The text of a completion after thinking, which the verifier scores. Used in the decoder processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.rewards.math import extract_answer


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """How the answer of a completion is found. Produced by `rollouts.plans`."""

    plan: Plan
    """Any interruption plan of the run: its closing tag ends thinking."""
    think_end: str
    """The closing tag as text."""
    hidden_ids: frozenset[int]
    """Tokens that are not part of the text: special tokens and those that end a completion."""

    def answer_text(self, token_ids: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str | None:
        """The text after thinking; None if thinking did not end.

        token_ids: [T] the completion. decode: token ids to text, special tokens included.
        """
        end = self.plan.thinking_end(token_ids)
        if end is None:
            return None
        # the tag's tokens may include neighboring text, so decode them too and cut the tag off as text
        rest = token_ids[end - len(self.plan.think_end_ids) :].tolist()
        return extract_answer(decode([token for token in rest if token not in self.hidden_ids]), self.think_end)

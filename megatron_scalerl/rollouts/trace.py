"""Records the tokens of policy and environment in an episode, in parts; each part becomes a training sample.

A context continues a part if the part's tokens are a prefix of the context, and no turn is being sampled in the part.
Any other context begins a new part, in which all tokens of the context are masked: an edited or summarized history, a
second answer to one context, a conversation of a sub-agent. So each token that the policy sampled is in exactly one
part, after the context in which the policy sampled the token.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq

import numpy as np

from megatron_scalerl.batching.rollout_bytes import RolloutArrays, joined_parts, read
from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.rollouts.decoder import Decoded
from megatron_scalerl.rollouts.plans import Draw
from megatron_scalerl.types import ENDS, EpisodeEnd, ExpertChoices


@dataclass(eq=False)
class Part:
    """A part of an episode: a context that grew with turns of the policy; becomes one training sample."""

    context: array[int]
    """All token ids of the part so far, which begin with `shared` ids of the group's prompt. An array of type `I` is
    fast to compare."""
    shared: int
    """Number of tokens at the start of `context` that are also the start of the group's prompt."""
    pieces: list[RolloutArrays] = field(default_factory=list)
    """The policy's turns in order, and before each turn the environment's tokens, if any."""
    busy: bool = False
    """True while a turn is being sampled."""


class Trace:
    """The tokens of an episode in progress, in parts, with rewards and the reason of the end."""

    def __init__(self, prompt: Sequence[int]):
        """prompt: [P] ids of the group's prompt; each context has to begin with the first id."""
        self.prompt = list(prompt)
        self.turns: list[PastTurn] = []
        self.rewards: list[bool | float] = []
        self.turn_rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        self.text: str | None = None
        """The answer in the policy's last turn; None without an answer."""
        self.end: EpisodeEnd = ENDS["truncated"]
        """How the episode ended: by a limit (`truncated`), unless the episode's sampler sets the end."""
        self._parts: list[Part] = []

    @property
    def thinking(self) -> int:
        """Number of thinking tokens in all turns; in a turn in which thinking did not end, all tokens count."""
        return sum(turn.answer_start or len(turn.token_ids) for turn in self.turns)

    @property
    def shared(self) -> list[int | None]:
        """For each part, the number of the prompt's tokens with which the part begins; None: the whole prompt."""
        return [None if part.shared == len(self.prompt) else part.shared for part in self._parts]

    def begins(self, context: list[int]) -> int:
        """Number of leading tokens that a context [N] has in common with the group's prompt."""
        return len(list(takewhile(bool, map(eq, context, self.prompt))))

    @contextlib.contextmanager
    def turn(self, context: list[int]) -> Iterator[Part]:
        """Context in which the caller samples the policy's turn after a context [N]; yields the part for `add`."""
        ids = array("I", context)
        idle = [part for part in self._parts if not part.busy and ids[: len(part.context)] == part.context]
        part = max(idle, key=lambda part: len(part.context), default=None)
        if part is None:
            shared = self.begins(context)
            part = Part(ids[:shared], shared)
        part.busy = True
        try:
            yield part
        finally:
            part.busy = False

    def add(self, part: Part, context: list[int], decoded: Decoded) -> PastTurn:
        """Append to a part the tokens of the context that the part lacks, and the policy's turn; returns the turn."""
        arrays = read(decoded.data)
        new_ids = context[len(part.context) :]
        if new_ids:
            part.pieces.append(_environment(new_ids, arrays))
        part.pieces.append(arrays)
        turn = PastTurn(token_ids=tuple(arrays.token_ids.tolist()), answer_start=decoded.answer_start)
        part.context = array("I", [*context, *turn.token_ids])
        if part not in self._parts:
            self._parts.append(part)
        self.turns.append(turn)
        self.text = decoded.text
        return turn

    def parts(self, draw: Draw) -> list[RolloutArrays]:
        """The training samples of the finished episode, one for each part."""
        return [
            replace(
                joined_parts(part.pieces),
                seed=draw.seed,
                thinking_cut=draw.thinking_cut,
                truncated=self.end.by == "limit",
                expert_choices=_choices(part.pieces),
            )
            for part in self._parts
        ]


def _environment(ids: list[int], turn: RolloutArrays) -> RolloutArrays:
    """The arrays of token ids [N] that the environment wrote before a turn: all masked, with the policy version of
    the turn's first token."""
    size = len(ids)
    return replace(
        turn,
        token_ids=np.array(ids, "<u4"),
        rollout_logprobs=np.zeros(size, "<f4"),
        policy_versions=np.repeat(turn.policy_versions[:1], size),
        loss_mask=np.zeros(size, bool),
        interrupted=False,
        expert_choices=None,
        environment=np.array([[0, size]], np.int64),
    )


def _choices(pieces: Sequence[RolloutArrays]) -> ExpertChoices | None:
    """The expert choices of all tokens of a part; None if no request reported experts.

    Each request reports the experts of all earlier tokens too; the first report about a token counts.
    """
    reports = [piece.expert_choices for piece in pieces if piece.expert_choices is not None]
    if not reports:
        return None
    data = b""
    for report in reports:
        data += report.data[len(data) :]
    return replace(reports[0], data=data)

r"""An algorithm with credit for each turn of an episode, on a game that pays for turns (examples/guess.py).

    source .venv/bin/activate        # after examples/quickstart.sh and examples/guess.sh
    PYTHONPATH=examples megatron-scalerl train recipes/tiny_cpu.yaml overlay=examples/guess.yaml name=turn_credit \
      algorithm=turn_credit:TurnCredit environment.name=turn_credit:ConsistentGuess steps=20 optimizer.lr=3e-4 \
      policy.path=runs/tiny_1/guess_policy prompts.path=runs/tiny_1/prompts.jsonl \
      prompts.held_out_path=runs/tiny_1/held_out.jsonl sft.path=runs/tiny_1/guess_sft.jsonl

The advantage of a turn is the sum of the rewards from this turn on, less the mean of that sum over the episodes of
the group that reached the turn: what was paid before is no merit of the turn. Nothing is divided.
"""

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from guess import Guess

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching.rollout_bytes import turn_numbers
from megatron_scalerl.losses.inputs import separable


class ConsistentGuess(Guess):
    """The game; a guess that the answers so far leave possible pays 0.1."""

    def reset(self, row):
        self.possible = set(range(7))
        return super().reset(row)

    def step(self, response):
        messages, right, done = super().step(response)
        guess = int(response.text) if len(response.text) == 1 and response.text in "0123456" else 7
        paid = (0.1 if guess in self.possible else 0.0) + (1.0 if right else 0.0)
        self.possible = {n for n in self.possible if n != guess and (n > guess) == (self.number > guess)}
        return messages, paid, done


@dataclass(frozen=True, kw_only=True)
class TurnCredit(ScaleRL):
    """Advantages of turns, from what the environment pays for each of them."""

    columns = ("turn_credit",)

    async def score(self, group, samples):
        to_go = []
        for completion, score in zip(group.completions, group.scores):
            paid = np.zeros(completion.turns)
            paid[: len(score.turn_rewards)] = score.turn_rewards
            paid[-1] += score.reward - paid.sum()  # of a verifier, or an agent's
            to_go.append(paid[::-1].cumsum()[::-1])
        columns, rest = [], iter(samples)
        for completion, own in zip(group.completions, to_go):
            means = [np.mean([other[n] for other in to_go if len(other) > n]) for n in range(len(own))]
            credit = own - means
            of_tokens = turn_numbers(list(islice(rest, len(completion.samples))))
            columns += [{"turn_credit": np.where(turns < 0, 0, credit[turns])} for turns in of_tokens]
        return columns

    @separable
    def loss(self, inputs):
        return super().loss(replace(inputs, advantages=inputs.columns["turn_credit"]))

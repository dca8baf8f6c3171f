"""An episode beside a single turn in one row, number by number; and a fork weighs what it weighs without the fork."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from batch_messages import frames_of, planned
from rollout_groups import group_of, parts_of, rollout
from stored_episodes import EPISODE, FORKED

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching.assignment import plan_step
from megatron_scalerl.batching.packing import build, real_tokens, sequence_ids
from megatron_scalerl.batching.rollout_bytes import arrays_of
from megatron_scalerl.controller.samples import samples_of
from megatron_scalerl.losses import LossInputs, cispo
from megatron_scalerl.trainer.batch_frames import checked
from megatron_scalerl.types import Prompt, Sample, Score

PLAIN = rollout(tokens=(9, 2))


def inputs(micro_batch, trainer_logprobs):
    """The row as the loss gets it; what is off the mask is NaN for the trainer."""
    return LossInputs(
        trainer_logprobs=torch.from_numpy(np.where(micro_batch.loss_mask, trainer_logprobs, np.nan)),
        rollout_logprobs=torch.from_numpy(micro_batch.rollout_logprobs).double(),
        advantages=torch.from_numpy(micro_batch.advantages).double(),
        loss_mask=torch.from_numpy(micro_batch.loss_mask),
        token_weights=torch.from_numpy(micro_batch.token_weights).double(),
        sequence_ids=torch.from_numpy(sequence_ids(micro_batch)),
    )


def test_an_episode_of_three_turns_beside_a_single_turn():
    samples = [
        Sample(prompt_token_ids=(1,), rollout=PLAIN, advantage=-1.0, token_weight=0.25),
        Sample(prompt_token_ids=(1, 13), rollout=EPISODE, advantage=0.5, token_weight=0.125),
    ]
    frames = frames_of(planned(samples, micro_batch_tokens=16, policy_version=5), samples)
    received = checked(frames)
    batch = build(received.plan, received.completions, pad_multiple=6)
    [row] = batch.micro_batches
    assert batch.step == 4
    assert row.cu_seqlens.tolist() == [0, 13, 16, 18] and real_tokens(batch) == 16
    assert row.position_ids.tolist() == [*range(13), 0, 1, 2, 0, 1]
    assert sequence_ids(row).tolist() == [0] * 13 + [1] * 3 + [2] * 2
    assert row.tokens.tolist() == [1, 13, 13, 5, 4, 8, 19, 6, 2, 16, 8, 15, 2, 1, 9, 2, 0, 0]
    assert row.targets.tolist() == [13, 13, 5, 4, 8, 19, 6, 2, 16, 8, 15, 2, 0, 9, 2, 0, 0, 0]
    assert np.flatnonzero(row.loss_mask).tolist() == [1, 6, 7, 9, 10, 11, 13, 14]
    logprobs = [0, -0.5, 0, 0, 0, 0, -0.25, -1, 0, -2, -0.75, -0.125, 0, -0.5, -0.5, 0, 0, 0]
    assert row.rollout_logprobs.tolist() == logprobs
    eighth, fourth = 0.125, 0.25
    weights = [0, eighth, 0, 0, 0, 0, eighth, eighth, 0, eighth, eighth, eighth, 0, fourth, fourth, 0, 0, 0]
    assert row.token_weights.tolist() == weights
    assert row.staleness.tolist() == [-1, 2, -1, -1, -1, -1, 2, 2, -1, 1, 1, 1, -1, 5, 5, -1, -1, -1]
    assert row.advantages.tolist() == [0.5] * 13 + [-1.0] * 3 + [0.0] * 2
    # the trainer finds each token as likely as not; its ratio to the engine is capped at 3 where that said e^-2
    loss = cispo(inputs(row, math.log(0.5)), max_is_weight=3.0).loss.item()
    episode = 0.5 * sum(math.exp(x) for x in (0.5, 0.25, 1.0, 0.75, 0.125)) + 3.0
    single = 0.5 * 2 * math.exp(0.5)
    hand = -math.log(0.5) * (0.125 * 0.5 * episode + 0.25 * -1.0 * single)
    assert loss == pytest.approx(hand, rel=1e-7)


def loss_of(made, reduction):
    """CISPO's loss, with its token weights [samples], of a batch of two groups, of which the first has `made`."""
    scores = [Score(correct=correct, reward=float(correct)) for correct in (True, False)]
    groups = []
    for number, members in enumerate([(PLAIN, made), (replace(PLAIN, seed=1), PLAIN)]):
        prompt = Prompt(prompt_id=f"p{number}", text="", answer="", token_ids=(1, 2))
        groups.append((group_of(members, scores, prompt=prompt, group_id=number), members))
    plan = samples_of([group for group, _ in groups], ScaleRL(reduction=reduction))
    parts = [arrays_of(part) for _, members in groups for one in members for part in parts_of(one)]
    step = plan_step(plan.samples, step=1, dp_size=1, micro_batch_tokens=14, policy_version=4)
    batch = build(step.ranks[0], [parts[i] for i in step.numbers[0]], pad_multiple=1)
    loss = sum(cispo(inputs(row, 1.5 * row.rollout_logprobs)).loss.item() for row in batch.micro_batches)
    return loss, [sample.token_weight for sample in plan.samples], plan


@pytest.mark.parametrize(
    "reduction, weight", [("prompt_mean", 1 / 16), ("sequence_mean", 1 / 24), ("token_mean", 1 / 12)]
)
def test_a_forked_episode_weighs_what_it_weighs_without_the_fork(reduction, weight):
    whole, whole_weights, whole_plan = loss_of(EPISODE, reduction)
    forked, weights, plan = loss_of(FORKED, reduction)
    assert forked == pytest.approx(whole, rel=1e-6) and abs(whole) > 0.01
    assert weights[1:4] == pytest.approx([weight] * 3) and whole_weights[1] == pytest.approx(weight)
    assert (weights[0], weights[4:]) == (whole_weights[0], whole_weights[2:])
    assert [sample.advantage for sample in plan.samples] == [1.0, -1.0, -1.0, -1.0, 1.0, -1.0]
    assert plan.stats | {"samples": 4.0} == whole_plan.stats, "filters count episodes"

"""The divergence of algorithm.kl in a step: its value, its gradient, and the base of adapters."""

import math
from dataclasses import replace

import pytest
import torch
from random_policies import write_policy
from random_policy import batches_of, random_samples
from transformers import AutoModelForCausalLM

COEFFICIENT = 0.3
ALONE = {"loss": {"max_is_weight": 1e-12}, "optimizer": {"clip_grad": 0}}
"""Sections with which the loss is the divergence alone."""


FAULTS = {
    "labels not shifted (ms-swift#8436)": dict(off=0),
    "the teacher one position off (AReaL#1728)": dict(teacher_off=1),
    "tokens of tools in the sum (open-instruct#1847)": dict(all_tokens=True),
    "columns of another prompt's length (TRL#6191)": dict(prompt=-1),
    "top 8, clamped at 0 (verl#7856, #5041)": dict(top=8),
}
"""Faults of other systems -> the change to the plain sum that makes each of them."""


def reference_kl(model, second, samples, direction, *, off=1, teacher_off=0, all_tokens=False, prompt=0, top=None):
    """(sum of weighted divergences with its gradient left in the model, mean over sampled tokens)."""
    total = 0.0
    divergences = []
    for number, sample in enumerate(samples):
        size = len(sample.rollout.token_ids)
        begin = len(samples[number + prompt].prompt_token_ids) - off
        ids = torch.tensor([sample.prompt_token_ids + sample.rollout.token_ids])
        s = model(ids).logits[0].double().log_softmax(-1)
        t = second(ids).logits[0].detach().double().log_softmax(-1).roll(teacher_off, 0)
        p, q = (s, t) if direction == "reverse" else (t, s)
        summands = p.exp() * (p - q)
        by_position = summands.sum(-1)
        if top:
            by_position = summands.gather(1, t.topk(top).indices).sum(-1).clamp(min=0)
        kept = torch.tensor(sample.rollout.loss_mask) | all_tokens
        by_token = by_position[begin : begin + size]
        divergences.append(by_token[kept[: len(by_token)]])
        total = total + COEFFICIENT * sample.token_weight * divergences[-1].sum()
    total.backward()
    return total.item(), torch.cat(divergences).mean().item()


def gradient_norm(model):
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_divergence_from_a_frozen_policy_is_the_plain_sum_and_none_of_the_faulty_ones(
    direction, new_trainer, policy, tmp_path
):
    other = write_policy(tmp_path / "other", seed=5)
    samples = random_samples(1)
    alone = samples[1].rollout
    fields = ("token_ids", "rollout_logprobs", "policy_versions", "loss_mask")
    one_token = replace(alone, **{name: getattr(alone, name)[-1:] for name in fields})
    samples[1] = replace(samples[1], rollout=one_token)
    section = {"kl": {"to": str(other), "coefficient": COEFFICIENT, "direction": direction}}
    [batch] = batches_of(samples, micro_batch_tokens=64)
    report = new_trainer(**ALONE, algorithm=section).step(batch)
    found = (report.loss, report.grad_norm, report.metrics["loss/kl"])
    assert report.loss > 0.01
    for name, changes in {"": {}, **FAULTS}.items():
        model, second = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (policy, other))
        divergence, mean = reference_kl(model, second, samples, direction, **changes)
        expected = pytest.approx((divergence, gradient_norm(model), mean), rel=1e-2 if name else 1e-5)
        assert (found != expected) if name else (found == expected), name


def test_the_base_of_new_adapters_is_the_policy_and_later_it_is_not(new_trainer):
    samples = random_samples(2)
    [batch] = batches_of(samples, micro_batch_tokens=64)
    lora = {"policy": {"lora": {"rank": 4}}}
    plain = new_trainer(**lora).step(batch)
    trainer = new_trainer(**lora, algorithm={"kl": {"coefficient": COEFFICIENT}})
    report = trainer.step(batch)
    assert report.metrics["loss/kl"] == 0.0
    # chunks of other sizes round otherwise
    assert report.loss == pytest.approx(plain.loss, rel=1e-6)
    assert report.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    [again] = batches_of(samples, micro_batch_tokens=64, step=2)
    assert trainer.step(again).metrics["loss/kl"] > 0.0

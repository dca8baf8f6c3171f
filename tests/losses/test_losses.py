"""Values and gradients of every loss against numbers computed by hand, each option on and off."""

import math

import pytest
import torch

from megatron_scalerl.losses import LOSSES, LossInputs, LossOutput, cispo, dapo, grpo, gspo, is_separable, make_loss
from megatron_scalerl.losses.inputs import log_ratio, masked, separable, weighted_sum

LN3 = math.log(3.0)


def run(loss, *, logits, targets, rollout_probs, advantages, weights, mask=None, sequences=None, **options):
    """The loss on log-softmaxed fixed logits: its output and the gradient of the logits."""
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    size = len(targets)
    logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(targets)[:, None])[:, 0]
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        rollout_logprobs=torch.tensor(rollout_probs, dtype=torch.float64).log(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(mask if mask is not None else [True] * size),
        token_weights=torch.tensor(weights, dtype=torch.float64),
        sequence_ids=torch.tensor(sequences if sequences is not None else [0] * size),
    )
    output = loss(inputs, **options)
    output.loss.backward()
    return output, logits.grad


# Two tokens: p = 1/2 at logits (0, 0), p = 3/4 at logits (ln 3, 0); d logp / d logits = onehot - p.
TWO = {"logits": [[0.0, 0.0], [LN3, 0.0]], "targets": [0, 0], "weights": [0.25, 0.5]}


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    # rho = .5/.05 = 10, capped to 5; and .75/.5 = 1.5. A = 1 and -2.
    output, grad = run(cispo, **TWO, rollout_probs=[0.05, 0.5], advantages=[1.0, -2.0], max_is_weight=5.0)
    expected = -(0.25 * 5 * 1 * math.log(0.5) + 0.5 * 1.5 * -2 * math.log(0.75))
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    # -w rho A (onehot - p): -.25*5*(.5, -.5) and +1.5*(.25, -.25)
    torch.testing.assert_close(grad, torch.tensor([[-0.625, 0.625], [0.375, -0.375]], dtype=torch.float64))
    assert output.capped.tolist() == [True, False]
    assert output.is_weights.tolist() == pytest.approx([10.0, 1.5])


def test_cispo_without_a_reachable_cap_has_the_full_weight():
    output, grad = run(cispo, **TWO, rollout_probs=[0.05, 0.5], advantages=[1.0, -2.0], max_is_weight=100.0)
    assert output.loss.item() == pytest.approx(-(0.25 * 10 * math.log(0.5) + 0.5 * 1.5 * -2 * math.log(0.75)))
    assert grad[0].tolist() == pytest.approx([-1.25, 1.25])
    assert not output.capped.any()


def test_cispo_cap_is_absolute_not_a_distance_from_one():
    # rho = .5/.09 = 5.56: between 5 and 1 + 5
    output, grad = run(cispo, **TWO, rollout_probs=[0.09, 0.75], advantages=[1.0, 0.0], max_is_weight=5.0)
    assert grad[0].tolist() == pytest.approx([-0.625, 0.625])
    assert output.capped.tolist() == [True, False]


def test_cispo_caps_at_five_by_default():
    """The paper's cap: rho = .5/.05 = 10 weighs 5."""
    _, grad = run(cispo, **TWO, rollout_probs=[0.05, 0.75], advantages=[1.0, 0.0])
    assert grad[0].tolist() == pytest.approx([-0.25 * 5 * 0.5, 0.25 * 5 * 0.5])


def test_cispo_truncates_only_from_above():
    # rho = .5/1 = .5 keeps its value with either sign of A
    for advantage in (1.0, -1.0):
        output, grad = run(cispo, **TWO, rollout_probs=[1.0, 0.75], advantages=[advantage, 0.0])
        assert grad[0].tolist() == pytest.approx([-0.25 * 0.5 * advantage * 0.5, 0.25 * 0.5 * advantage * 0.5])
        assert not output.capped.any()


# Four tokens at p = 1/2 whose rho is 2, 2, 1/2, 1/2 with A = 1, -1, 1, -1, all weights 1/4.
FOUR = {
    "logits": [[0.0, 0.0]] * 4,
    "targets": [0] * 4,
    "weights": [0.25] * 4,
    "rollout_probs": [0.25, 0.25, 1.0, 1.0],
    "advantages": [1.0, -1.0, 1.0, -1.0],
}


@pytest.mark.parametrize(("loss", "high"), [(dapo, 1.26), (grpo, 1.2)])
def test_clipped_losses_take_the_pessimistic_branch(loss, high):
    output, grad = run(loss, **FOUR)
    # min: high*1 (clipped), 2*-1 (free), .5*1 (free), .8*-1 (clipped)
    assert output.loss.item() == pytest.approx(-0.25 * (high - 2.0 + 0.5 - 0.8))
    # free tokens: -w A rho (onehot - p)
    expected = [[0.0, 0.0], [0.25, -0.25], [-0.0625, 0.0625], [0.0, 0.0]]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))
    assert output.capped.tolist() == [True, False, False, True]


def test_dapo_keeps_a_gradient_where_grpo_clips():
    # rho = .5/.4065 = 1.23 lies between 1.2 and 1.26
    case = {**TWO, "rollout_probs": [0.5 / 1.23, 0.75], "advantages": [1.0, 0.0]}
    assert run(dapo, **case)[1][0].tolist() == pytest.approx([-0.25 * 1.23 * 0.5, 0.25 * 1.23 * 0.5])
    assert run(grpo, **case)[1][0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("loss", [dapo, grpo])
def test_clips_given_replace_the_defaults(loss):
    output, grad = run(loss, **FOUR, clip_low=0.9, clip_high=1.5)
    assert output.loss.item() == pytest.approx(-0.25 * (2.0 - 2.0 + 0.5 - 0.5))
    assert not output.capped.any()
    assert (grad != 0).all()


def gspo_case(*, log_ratios, **options):
    """Sequences 0 and 1 with two tokens each at p = 1/2, A = 1, weights 1/4, given log ratios."""
    probs = [0.5 * math.exp(-r) for r in log_ratios]
    return run(
        gspo,
        logits=[[0.0, 0.0]] * 4,
        targets=[0] * 4,
        weights=[0.25] * 4,
        rollout_probs=probs,
        advantages=[1.0] * 4,
        sequences=[0, 0, 1, 1],
        **options,
    )


def test_gspo_uses_the_mean_ratio_of_the_sequence():
    # sequence 0: mean .01, s = 1.01005 > 1.005, clipped; sequence 1: mean .004, s = e^.004, free
    output, grad = gspo_case(log_ratios=[0.03, -0.01, 0.0, 0.008])
    assert output.loss.item() == pytest.approx(-(0.5 * 1.005 + 0.5 * math.exp(0.004)))
    # each token of sequence 1: -(w1 + w2) A s / |y| (onehot - p) = -.5 * s / 2 * .5
    each = 0.5 * math.exp(0.004) / 2 * 0.5
    expected = [[0, 0], [0, 0], [-each, each], [-each, each]]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))
    assert output.capped.tolist() == [True, True, False, False]
    assert output.is_weights.tolist() == pytest.approx([math.exp(0.01)] * 2 + [math.exp(0.004)] * 2)


def test_gspo_clips_below_at_its_lower_distance_when_the_advantage_is_negative():
    output, grad = run(
        gspo,
        logits=[[0.0, 0.0]] * 2,
        targets=[0, 0],
        weights=[0.5, 0.5],
        rollout_probs=[0.5 * math.exp(0.004)] * 2,
        advantages=[-1.0, -1.0],
    )
    assert output.loss.item() == pytest.approx(0.997)  # -min(-s, -(1 - .003)) with s = e^-.004 = .996
    assert (grad == 0).all()


def test_gspo_leaves_masked_tokens_out_of_the_length():
    output, _ = run(
        gspo,
        logits=[[0.0, 0.0]] * 2,
        targets=[0, 0],
        weights=[1.0, 0.0],
        mask=[True, False],
        rollout_probs=[0.5 * math.exp(-0.004), 1e-9],
        advantages=[1.0, 1.0],
    )
    assert output.loss.item() == pytest.approx(-math.exp(0.004))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_masked_positions_reach_neither_value_nor_gradient(name):
    loss = make_loss(name, {})
    nan, inf = float("nan"), float("inf")
    logprobs = torch.tensor([-0.7, nan, -inf, -0.5], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    given = LossInputs(
        trainer_logprobs=logprobs,
        rollout_logprobs=torch.tensor([-0.7, inf, nan, -0.5]),
        advantages=torch.tensor([1.0, nan, inf, -1.0]),
        loss_mask=mask,
        token_weights=torch.tensor([0.5, nan, inf, 0.25]),
        sequence_ids=torch.tensor([0, 0, 0, 1]),
    )
    output = loss(given)
    output.loss.backward()
    clean = LossInputs(
        trainer_logprobs=torch.tensor([-0.7, -0.5]),
        rollout_logprobs=torch.tensor([-0.7, -0.5]),
        advantages=torch.tensor([1.0, -1.0]),
        loss_mask=torch.tensor([True, True]),
        token_weights=torch.tensor([0.5, 0.25]),
        sequence_ids=torch.tensor([0, 1]),
    )
    assert output.loss.item() == pytest.approx(loss(clean).loss.item())
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.0, 0.0, 0.25])
    assert output.is_weights.tolist() == [1.0] * 4
    assert not output.capped.any()


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("rollout", [-1e4, 0.0])
def test_an_overflowing_log_ratio_stays_finite(name, rollout):
    logprobs = torch.tensor([-1e4 if rollout == 0.0 else -0.1, -0.5], requires_grad=True)
    given = LossInputs(
        trainer_logprobs=logprobs,
        rollout_logprobs=torch.tensor([rollout, -0.5]),
        advantages=torch.tensor([-1.0, 1.0]),
        loss_mask=torch.tensor([True, True]),
        token_weights=torch.tensor([0.5, 0.5]),
        sequence_ids=torch.tensor([0, 1]),
    )
    output = make_loss(name, {})(given)
    output.loss.backward()
    assert torch.isfinite(output.loss) and torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(output.is_weights).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("distance", [25.0, -25.0])
def test_a_log_ratio_is_clamped_to_twenty_nats_and_has_no_gradient_there(name, distance):
    """A ratio that large is a fault of the data: it is bounded, and teaches nothing."""
    logprobs = torch.tensor([-30.0 + distance], requires_grad=True)
    given = LossInputs(
        trainer_logprobs=logprobs,
        rollout_logprobs=torch.tensor([-30.0]),
        advantages=torch.tensor([1.0]),
        loss_mask=torch.tensor([True]),
        token_weights=torch.tensor([1.0]),
        sequence_ids=torch.tensor([0]),
    )
    output = make_loss(name, {})(given)
    assert output.is_weights.log().tolist() == pytest.approx([math.copysign(20.0, distance)])
    if name != "cispo":  # whose gradient never goes through the ratio
        output.loss.backward()
        assert logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_micro_batch_without_loss_is_zero_with_zero_gradient(name):
    logprobs = torch.tensor([-0.3, -0.4], requires_grad=True)
    given = LossInputs(
        trainer_logprobs=logprobs,
        rollout_logprobs=torch.zeros(2),
        advantages=torch.zeros(2),
        loss_mask=torch.tensor([False, False]),
        token_weights=torch.zeros(2),
        sequence_ids=torch.tensor([0, 0]),
    )
    output = make_loss(name, {})(given)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_make_loss_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match=r"loss.name: 'ppo' .* cispo, .* module:function"):
        make_loss("ppo", {})
    with pytest.raises(ValueError, match=r"loss.clip_high is 0.2, .* cispo takes max_is_weight;"):
        make_loss("cispo", dict(max_is_weight=5.0, clip_high=0.2))


def test_make_loss_binds_cap_and_clips():
    case = {**TWO, "rollout_probs": [0.05, 0.5], "advantages": [1.0, -2.0]}
    for cap in (4.0, 8.0):
        assert run(make_loss("cispo", dict(max_is_weight=cap)), **case)[1][0, 1].item() == pytest.approx(0.125 * cap)
    wide = make_loss("dapo", dict(clip_low=0.9, clip_high=1.5))
    assert run(wide, **FOUR)[0].loss.item() == pytest.approx(0.0)


@separable
def reinforce(inputs, *, scale):
    """A loss outside the package."""
    advantages, logprobs = (masked(x, inputs.loss_mask) for x in (inputs.advantages, inputs.trainer_logprobs))
    ratio = log_ratio(inputs).detach().exp()
    loss = -scale * weighted_sum(advantages * logprobs, inputs)
    return LossOutput(loss=loss, is_weights=ratio, capped=ratio > 1e9)


def test_a_loss_may_live_outside_the_package():
    name = f"{__name__}:reinforce"
    output, grad = run(make_loss(name, {"scale": 2.0}), **TWO, rollout_probs=[0.05, 0.5], advantages=[1.0, -2.0])
    plain, half = run(make_loss(name, {"scale": 1.0}), **TWO, rollout_probs=[0.05, 0.5], advantages=[1.0, -2.0])
    assert output.loss.item() == pytest.approx(2 * plain.loss.item()) and torch.equal(grad, 2 * half)
    assert is_separable(name) and is_separable("cispo") and not is_separable("gspo")
    with pytest.raises(ValueError, match=r"loss.options: .*:reinforce .* {} \(missing a required .*scale"):
        make_loss(name, {})
    with pytest.raises(ValueError, match=r"loss.max_is_weight is 5.0, .* takes scale;"):
        make_loss(name, {"scale": 1.0, "max_is_weight": 5.0})
    with pytest.raises(ValueError, match=r"loss.name: 'nowhere:loss'"):
        make_loss("nowhere:loss", {})
    with pytest.raises(ValueError, match=r"loss.options: .* math:pi .* {}"):
        make_loss("math:pi", {})

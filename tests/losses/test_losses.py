"""Values and gradients of every loss against numbers computed by hand, each option on and off."""

import math

import pytest
import torch

from megatron_scalerl.losses import LOSSES, LossInputs, LossOutput, cispo, dapo, grpo, gspo, is_separable, make_loss
from megatron_scalerl.losses.inputs import log_ratio, masked, separable, weighted_sum

LN3 = math.log(3.0)


def inputs_of(trainer_logprobs, rollout_logprobs, advantages, weights, mask=None, sequences=None):
    """One sequence whose tokens are all sampled, by default; floats as the trainer's."""
    size = len(advantages)
    dtype = trainer_logprobs.dtype
    return LossInputs(
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=dtype),
        advantages=torch.tensor(advantages, dtype=dtype),
        loss_mask=torch.tensor(mask or [True] * size),
        token_weights=torch.tensor(weights, dtype=dtype),
        sequence_ids=torch.tensor(sequences or [0] * size),
    )


def of_logprobs(loss, trainer_logprobs, *rest):
    """The loss on the trainer's log-probs: its output and their gradient."""
    logprobs = torch.tensor(trainer_logprobs, requires_grad=True)
    output = loss(inputs_of(logprobs, *rest))
    output.loss.backward()
    return output, logprobs.grad.tolist()


def run(loss, *, logits, rollout_probs, advantages, weights, mask=None, sequences=None, **options):
    """The loss of the first of two tokens, by log-softmaxed logits: its output and the gradient of the logits."""
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)[:, 0]
    rollout_logprobs = [math.log(prob) for prob in rollout_probs]
    output = loss(inputs_of(logprobs, rollout_logprobs, advantages, weights, mask, sequences), **options)
    output.loss.backward()
    return output, logits.grad


# Two tokens: p = 1/2 at logits (0, 0), p = 3/4 at logits (ln 3, 0); d logp / d logits = onehot - p.
TWO = {"logits": [[0.0, 0.0], [LN3, 0.0]], "weights": [0.25, 0.5]}


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    # rho = .5/.05 = 10, capped to 5; and .75/.5 = 1.5. A = 1 and -2.
    output, grad = run(cispo, **TWO, rollout_probs=[0.05, 0.5], advantages=[1.0, -2.0], max_is_weight=5.0)
    expected = -(0.25 * 5 * 1 * math.log(0.5) + 0.5 * 1.5 * -2 * math.log(0.75))
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    # -w rho A (onehot - p): -.25*5*(.5, -.5) and +1.5*(.25, -.25)
    torch.testing.assert_close(grad, torch.tensor([[-0.625, 0.625], [0.375, -0.375]], dtype=torch.float64))
    assert output.capped.tolist() == [True, False]
    assert output.is_weights.tolist() == pytest.approx([10.0, 1.5])


@pytest.mark.parametrize(
    "rollout_prob, advantage, options, weight",
    [
        (0.05, 1.0, {"max_is_weight": 100.0}, 10.0),  # rho = .5/.05 = 10, below the cap
        (0.05, 1.0, {}, 5.0),  # the paper's cap
        (0.09, 1.0, {"max_is_weight": 5.0}, 5.0),  # rho = 5.56, between 5 and 1 + 5: no distance from one
        (1.0, 1.0, {}, 0.5),  # truncated from above only, with either sign of A
        (1.0, -1.0, {}, 0.5),
    ],
)
def test_cispo_weighs_by_the_capped_ratio(rollout_prob, advantage, options, weight):
    output, grad = run(cispo, **TWO, rollout_probs=[rollout_prob, 0.75], advantages=[advantage, 0.0], **options)
    assert grad[0].tolist() == pytest.approx([-0.125 * weight * advantage, 0.125 * weight * advantage])
    assert output.capped.tolist() == [weight == 5.0, False]


# Four tokens at p = 1/2 whose rho is 2, 2, 1/2, 1/2 with A = 1, -1, 1, -1, all weights 1/4.
FOUR = {
    "logits": [[0.0, 0.0]] * 4,
    "weights": [0.25] * 4,
    "rollout_probs": [0.25, 0.25, 1.0, 1.0],
    "advantages": [1.0, -1.0, 1.0, -1.0],
}


@pytest.mark.parametrize("loss, high", [(dapo, 1.26), (grpo, 1.2)])
def test_clipped_losses_take_the_pessimistic_branch(loss, high):
    output, grad = run(loss, **FOUR)
    # min: high*1 (clipped), 2*-1 (free), .5*1 (free), .8*-1 (clipped)
    assert output.loss.item() == pytest.approx(-0.25 * (high - 2.0 + 0.5 - 0.8))
    # free tokens: -w A rho (onehot - p)
    expected = [[0.0, 0.0], [0.25, -0.25], [-0.0625, 0.0625], [0.0, 0.0]]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))
    assert output.capped.tolist() == [True, False, False, True]


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_clips_given_replace_the_defaults(name):
    output, grad = run(make_loss(name, dict(clip_low=0.9, clip_high=1.5)), **FOUR)
    assert output.loss.item() == pytest.approx(-0.25 * (2.0 - 2.0 + 0.5 - 0.5))
    assert not output.capped.any()
    assert (grad != 0).all()


def run_gspo(log_ratios, advantage=1.0, **given):
    """Tokens at p = 1/2 with these log ratios."""
    size = len(log_ratios)
    given = {"weights": [1 / size] * size} | given
    probs = [0.5 * math.exp(-ratio) for ratio in log_ratios]
    return run(gspo, logits=[[0.0, 0.0]] * size, rollout_probs=probs, advantages=[advantage] * size, **given)


def test_gspo_uses_the_mean_ratio_of_the_sequence():
    # sequence 0: mean .01, s = 1.01005 > 1.005, clipped; sequence 1: mean .004, s = e^.004, free
    output, grad = run_gspo([0.03, -0.01, 0.0, 0.008], sequences=[0, 0, 1, 1])
    assert output.loss.item() == pytest.approx(-(0.5 * 1.005 + 0.5 * math.exp(0.004)))
    # each token of sequence 1: -(w1 + w2) A s / |y| (onehot - p) = -.5 * s / 2 * .5
    each = 0.5 * math.exp(0.004) / 2 * 0.5
    expected = [[0, 0], [0, 0], [-each, each], [-each, each]]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))
    assert output.capped.tolist() == [True, True, False, False]
    assert output.is_weights.tolist() == pytest.approx([math.exp(0.01)] * 2 + [math.exp(0.004)] * 2)


def test_gspo_clips_below_at_its_lower_distance_when_the_advantage_is_negative():
    output, grad = run_gspo([-0.004] * 2, advantage=-1.0)
    assert output.loss.item() == pytest.approx(0.997)  # -min(-s, -(1 - .003)) with s = e^-.004 = .996
    assert (grad == 0).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_masked_positions_reach_neither_value_nor_gradient(name):
    loss = make_loss(name, {})
    nan, inf = float("nan"), float("inf")
    rest = [-0.7, inf, nan, -0.5], [1.0, nan, inf, -1.0], [0.5, nan, inf, 0.25]
    output, grad = of_logprobs(loss, [-0.7, nan, -inf, -0.5], *rest, [True, False, False, True], [0, 0, 0, 1])
    clean, _ = of_logprobs(loss, [-0.7, -0.5], [-0.7, -0.5], [1.0, -1.0], [0.5, 0.25], None, [0, 1])
    assert output.loss.item() == pytest.approx(clean.loss.item())
    assert grad == pytest.approx([-0.5, 0.0, 0.0, 0.25])
    assert output.is_weights.tolist() == [1.0] * 4
    assert not output.capped.any()


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("distance", [25.0, -25.0])
def test_a_log_ratio_is_clamped_to_twenty_nats_and_has_no_gradient_there(name, distance):
    """A ratio that large is a fault of the data: it is bounded, and teaches nothing."""
    output, grad = of_logprobs(make_loss(name, {}), [-30.0 + distance], [-30.0], [1.0], [1.0])
    assert output.is_weights.log().tolist() == pytest.approx([math.copysign(20.0, distance)])
    if name != "cispo":  # whose gradient never goes through the ratio
        assert grad == [0.0]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_micro_batch_without_loss_is_zero_with_zero_gradient(name):
    zeros = [0.0, 0.0]
    output, grad = of_logprobs(make_loss(name, {}), [-0.3, -0.4], zeros, zeros, zeros, [False, False])
    assert output.loss.item() == 0.0
    assert grad == zeros


def test_make_loss_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match=r"loss.name 'ppo': it has to be cispo, .* or 'module:function'"):
        make_loss("ppo", {})
    with pytest.raises(ValueError, match=r"loss.clip_high is 0.2, .* cispo takes max_is_weight;"):
        make_loss("cispo", dict(max_is_weight=5.0, clip_high=0.2))


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
    with pytest.raises(ValueError, match=r"loss.name 'nowhere:loss': the module cannot be imported"):
        make_loss("nowhere:loss", {})
    with pytest.raises(ValueError, match=r"loss.options: .* math:pi .* {}"):
        make_loss("math:pi", {})

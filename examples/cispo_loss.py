"""One CISPO step in a training loop of your own: weights of the tokens, ratio of trainer over engine, gradient.

    python examples/cispo_loss.py

In a Megatron loop the loss function that `forward_step` returns calls `cispo` on the micro-batch. The sum is over
the tokens of all ranks and micro-batches, and `token_weights` has the denominator of the whole batch: multiply by the
number of micro-batches and the data-parallel size, by which Megatron divides.
Source: Khatri et al. 2025, arXiv 2510.13786, eq. 4.
"""

import torch

from megatron_scalerl.losses import LossInputs, cispo
from megatron_scalerl.losses.reduction import token_weights

LENGTHS = [[3, 5], [4, 2, 6]]
"""Sampled tokens of each completion, prompt by prompt."""
REWARDS = [[1.0, -1.0], [1.0, 1.0, -1.0]]


def main() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([length for group in LENGTHS for length in group])
    per_token = torch.repeat_interleave  # a completion's number to each of its tokens

    # advantages: reward minus the prompt's mean, divided by the batch's standard deviation (section 3.2)
    centered = [torch.tensor(group) - torch.tensor(group).mean() for group in REWARDS]
    advantages = torch.cat(centered) / torch.cat(centered).std(correction=0)
    weights = torch.tensor([weight for group in token_weights(LENGTHS, "prompt_mean") for weight in group])

    engine = -torch.rand(int(lengths.sum()))  # log-probabilities that came with the samples
    trainer = (engine + 0.1 * torch.randn_like(engine)).requires_grad_()  # those of the policy that is trained
    with torch.no_grad():
        trainer[0] = engine[0] + 2.0  # a ratio of 7.4, above the cap of 5
    inputs = LossInputs(
        trainer_logprobs=trainer,
        rollout_logprobs=engine,
        advantages=per_token(advantages, lengths),
        loss_mask=torch.ones_like(engine, dtype=torch.bool),  # False for the prompt and for forced tokens
        token_weights=per_token(weights, lengths),
        sequence_ids=per_token(torch.arange(len(lengths)), lengths),
    )
    output = cispo(inputs, max_is_weight=5.0)
    output.loss.backward()

    print(
        f"loss {output.loss.item():+.4f}, ratio mean {output.is_weights.mean():.3f} max {output.is_weights.max():.3f}"
    )
    print(f"capped: {int(output.capped.sum())} of {len(engine)} tokens; each keeps a gradient, unlike with clipping:")
    expected = -(inputs.token_weights * output.is_weights.clamp(max=5.0) * inputs.advantages)
    print(f"token 0 {trainer.grad[0]:+.4f}, by hand {expected[0]:+.4f}; all {torch.allclose(trainer.grad, expected)}")


if __name__ == "__main__":
    main()

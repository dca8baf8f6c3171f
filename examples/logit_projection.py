"""The FP32 logit projection in a training loop of your own, without this package's trainer.

    python examples/logit_projection.py                              # one rank
    torchrun --nproc-per-node 2 examples/logit_projection.py         # the vocabulary over two ranks, gloo

In a Megatron loop, `hidden` is the last decoder layer's output [tokens, H], `weight` is `model.output_layer.weight`,
this rank's rows of the head, and `group` is `parallel_state.get_tensor_model_parallel_group()`. The call replaces the
output layer, `vocab_parallel_cross_entropy` and the logits [tokens, V] between them.
"""

import os

import torch
import torch.distributed as dist

from megatron_scalerl.logits import token_logprobs

TOKENS, HIDDEN, VOCABULARY = 512, 256, 16_384


def main() -> None:
    group = None
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    rank, size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)

    torch.manual_seed(0)  # the same on every rank, as in a tensor-parallel group
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    head = torch.randn(VOCABULARY, HIDDEN).mul(0.3).bfloat16()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    weight = head.chunk(size)[rank].clone().requires_grad_()

    logprobs, entropy = token_logprobs(hidden, weight, targets, group=group, entropy="metric", workspace_mb=64)
    (-logprobs.mean()).backward()

    exact = torch.log_softmax(hidden.detach().double() @ head.double().T, dim=-1)
    rounded = torch.log_softmax((hidden.detach() @ head.T).float(), dim=-1)  # bf16 logits
    at_target = exact.gather(1, targets[:, None])[:, 0]
    if rank == 0:
        error = (logprobs.detach() - at_target).abs().max().item()
        error_bf16 = (rounded.gather(1, targets[:, None])[:, 0] - at_target).abs().max().item()
        print(f"{size} rank(s), head {tuple(weight.shape)} each, gradient {weight.grad.norm():.4f} on rank 0")
        print(f"largest error of a log-probability: {error:.1e} nats; with bf16 logits {error_bf16:.1e}")
        print(f"mean entropy {entropy.mean():.4f}, exact {-(exact.exp() * exact).sum(1).mean():.4f}")
    if group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

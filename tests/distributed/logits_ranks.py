"""What one rank of the vocabulary-parallel logit tests does."""

from dataclasses import dataclass

import torch

VOCAB = 12
TOKENS = 12
"""One token for each id: targets on both edges of every shard of 1, 2 and 4 ranks."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One projection of the fixed problem."""

    level: float = 0.0
    """Of all logits."""
    padded: int = VOCAB
    """Rows of the head in all."""
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    masked: bool = False
    in_chunks: bool = False
    workspace_mb: float = 0.003
    direction: str = ""
    """Of the divergence from a second policy, whose weighted sum is then all of the loss; "": there is none."""


def problem(level, dtype):
    generator = torch.Generator().manual_seed(11)
    h = torch.randn(TOKENS, 6, generator=generator, dtype=torch.float64)
    w = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64)
    h[:, 0], w[:, 0] = 1.0, level
    return h.to(dtype), w.to(dtype), torch.arange(TOKENS).roll(5)


def many(cases):
    """Every case, on this rank of a world that is one tensor-parallel group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [run(case, dist.group.WORLD) for case in cases]


def run(case, group=None):
    """Log-probabilities, entropies and the gradients of a weighted sum; the head is sharded over the group."""
    from megatron_scalerl.logits import token_logprobs, token_loss

    h, w, y = problem(case.level, case.dtype)
    full = torch.cat([w, w.new_full((case.padded - VOCAB, w.shape[1]), 5.0)])
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    weight = full.chunk(size)[rank].clone().requires_grad_()
    share = case.sequence_parallel and group is not None
    hidden = (h.chunk(size)[rank] if share else h).clone().requires_grad_()
    places = torch.tensor([i for i in range(TOKENS) if i % 3 != 1]) if case.masked else None
    options = dict(
        group=group,
        entropy="grad",
        vocab_size=VOCAB,
        workspace_mb=case.workspace_mb,
        sequence_parallel=case.sequence_parallel,
        places=places,
    )
    weights = torch.linspace(-1.0, 2.0, TOKENS, dtype=torch.float64).to(h.dtype)

    def loss(logprobs, entropies, places):
        return (logprobs * weights[places]).sum() + (entropies * weights.flip(0)[places]).sum()

    divergences = {}
    if case.direction:
        options |= dict(grad_logits="fp32", temperature=0.7, second=second(case, rank, size, share, weights))
        value, logprob, entropy, kl = token_loss(
            hidden, weight, y, lambda logprobs, *_: 0 * logprobs.sum(), **options
        )
        divergences = {"kl": kl.detach()}
    elif case.in_chunks:
        value, logprob, entropy = token_loss(hidden, weight, y, loss, **options)
    else:
        logprob, entropy = token_logprobs(hidden, weight, y, **options)
        value = loss(logprob, entropy, torch.arange(TOKENS))
    value.backward()
    found = dict(value=value.detach(), logprob=logprob.detach(), entropy=entropy.detach())
    return dict(found, **divergences, grad_h=hidden.grad, grad_w=weight.grad)


def second_problem(dtype):
    """Hidden states and head of the second policy, wider than the first."""
    generator = torch.Generator().manual_seed(12)
    hidden, head = (torch.randn(rows, 10, generator=generator, dtype=torch.float64) for rows in (TOKENS, VOCAB))
    return hidden.to(dtype), (head / 3).to(dtype)  # a few nats apart, as policies of one family are


def second(case, rank, size, share, weights):
    """The second policy of a case, with this rank's rows of its head, and its share of the tokens."""
    from megatron_scalerl.logits.divergence import SecondPolicy

    hidden, head = second_problem(case.dtype)
    head = torch.cat([head, head.new_full((case.padded - VOCAB, head.shape[1]), 5.0)]).chunk(size)[rank]
    hidden = hidden.chunk(size)[rank] if share else hidden
    return SecondPolicy(hidden=hidden, weight=head, token_weights=weights, direction=case.direction)


def exact_divergence(case):
    """(value, divergences, gradients of hidden and of the head's VOCAB rows) by log_softmax in float64."""
    h, w, _ = problem(case.level, case.dtype)
    h, w = h.double().requires_grad_(), w.double().requires_grad_()
    other, head = (tensor.double() for tensor in second_problem(case.dtype))
    s, t = ((a @ b.t() / 0.7).log_softmax(-1) for a, b in ((h, w), (other, head)))
    p, q = (s, t) if case.direction == "reverse" else (t, s)
    divergences = (p.exp() * (p - q)).sum(-1)
    weights = torch.linspace(-1.0, 2.0, TOKENS, dtype=torch.float64)
    if case.masked:
        divergences = divergences * torch.tensor([i % 3 != 1 for i in range(TOKENS)])
    value = (weights * divergences).sum()
    value.backward()
    return dict(value=value.detach(), kl=divergences.detach(), grad_h=h.grad, grad_w=w.grad)

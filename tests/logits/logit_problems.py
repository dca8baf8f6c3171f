"""Projections with known answers, and the answer of log_softmax in fp64."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
IN_FP32_AND_BF16 = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def problem(tokens=7, hidden=5, vocab=11, dtype=torch.float64, top=None):
    """hidden, weight and targets; `top` scales the largest |logit| to it."""
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    y = torch.randint(0, vocab, (tokens,), generator=generator)
    if top is not None:
        w *= top / (h @ w.t()).abs().max()
    return h.to(dtype), w.to(dtype), y


def leaves(*sizes, **options):
    """`problem` with hidden and weight that get a gradient."""
    h, w, y = problem(*sizes, **options)
    return h.requires_grad_(), w.requires_grad_(), y


def by_log_softmax(h, w, y, temperature=1.0):
    """Log-probabilities and entropies in fp64, differentiable."""
    scale = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1)
    log_p = (h.double() @ w.double().t() / scale).log_softmax(-1)
    return log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradients_by_log_softmax(h, w, y, of_logprob, of_entropy=None):
    """Gradients, in fp64, of sum(of_logprob * logprob) + sum(of_entropy * entropy)."""
    h, w = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    logprob, entropy = by_log_softmax(h, w, y)
    total = (of_logprob.double() * logprob).sum()
    if of_entropy is not None:
        total = total + (of_entropy.double() * entropy).sum()
    total.backward()
    return h.grad, w.grad


def relative(found, expected):
    """Norm of the difference over the norm of what was expected."""
    return float((found.double() - expected).norm() / expected.norm())


def as_megatron_parameter(weight, dtype=torch.float32):
    """A parameter with the main_grad that Megatron's DDP would make."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.main_grad = torch.zeros_like(weight, dtype=dtype)
    parameter.grad_added_to_main_grad = False
    return parameter


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that are still there; `peak` is their most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # set_ hands a storage on: so the interpreter shows a kernel its arguments
            if not isinstance(tensor, torch.Tensor) or "set_" in str(function):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._alive:
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key, size):
        self._alive.discard(key)
        self.now -= size

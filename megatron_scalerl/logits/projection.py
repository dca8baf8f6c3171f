"""The interface between the logit projection and the backends.

The life of a projection:

1. `arguments.checked` makes a `function.Call` with a `Projection` of the right shapes.
2. The autograd function adds the hidden states.
3. A `Backend` returns the statistics [4, T] of this rank's columns.
4. `merged_statistics` joins the statistics of all ranks, and `results` computes log-probabilities and entropies.
5. In the backward pass the backend adds to both gradients.

`merged_statistics` is a fixed sequence of operations in the order of the parts, so ranks with the same parts get the
same bits. r, the sum of exponentials, leaves out the maximum's own term. log1p(r) then keeps the digits of the
log-probability of a token that is almost certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_scalerl.record import record
from megatron_scalerl.types import Bool, Float, Int64

Precision = Literal["fp32", "model"]
Entropy = Literal["none", "metric", "grad"]
GradLogits = Literal["bf16", "bf16x2", "fp32"]


@record
class Projection:
    """The inputs from which a backend computes this rank's columns of the logits, z = scale * hidden @ weight.T."""

    hidden: Float[Tensor, "T H"]
    """Hidden states of the tokens with loss."""
    weight: Float[Tensor, "n H"]
    """This rank's rows of the head without padding, in hidden's dtype; n may be 0."""
    targets: Int64[Tensor, " T"]
    """Target of each token, as an id of the whole vocabulary."""
    scale: Tensor
    """1 / temperature, a 0-dimensional tensor in the accumulator's dtype."""
    first: int
    """Id of column 0 in the whole vocabulary."""
    round_logits: bool
    """True: hidden @ weight.T is rounded to hidden's dtype before the scale, as in an engine without an fp32 head.

    Always False for fp32 and fp64 operands, whose product is not rounded."""
    entropy: bool
    """True: the statistics need row u (see `Backend`), for the entropy. Otherwise u may be 0."""
    entropy_grad: bool
    """True: the `TokenGradients` contain a gradient of the entropy."""
    grad_logits: GradLogits
    """Form in which the gradient of the logits enters the GEMMs with bf16 operands.

    "bf16": rounded. "bf16x2": as the sum of two bf16 terms for the weight's gradient. The gradient of hidden, which
    ends in bf16, uses the first term alone. "fp32": unrounded, with operands cast to fp32. fp32 and fp64 operands
    always have "fp32"."""
    workspace_bytes: int
    """Bound on a backend's allocations: blocks of logits and of gradients, casts of operands, partial sums."""

    @property
    def tokens(self) -> int:
        """T, the number of tokens with loss."""
        return self.hidden.shape[0]

    @property
    def count(self) -> int:
        """n, the number of this rank's columns."""
        return self.weight.shape[0]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute, because there is no token or no column on this rank."""
        return not self.tokens or not self.count

    @property
    def accumulator(self) -> torch.dtype:
        """The type of sums, logits and statistics: fp64 for fp64 input, else fp32."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def of_tokens(self, rows: slice) -> Projection:
        """The projection of the tokens `rows`, with views of the tensors."""
        return replace(self, hidden=self.hidden[rows], targets=self.targets[rows])

    def owned(self, columns: slice) -> tuple[Bool[Tensor, " T"], Int64[Tensor, "T 1"]]:
        """(bool [T], True for a token whose target is in `columns` of this rank; [T, 1] the target's column).

        The target's column is counted from the first of `columns`. For a target that is not in `columns`, the number
        is an arbitrary column in the range.
        """
        # Columns are clamped into the block, so that every row can be gathered and scattered. To skip rows, the host
        # would have to count them, and so wait for the device.
        width = columns.stop - columns.start
        local = self.targets - (self.first + columns.start)
        return (local >= 0) & (local < width), local.clamp(0, width - 1)[:, None]


@record
class TokenGradients:
    """For each token, the numbers from which `Backend.gradients` computes the logits' gradient, in the accumulator's
    dtype."""

    lse: Float[Tensor, " T"]
    """Log-sum-exp over the whole vocabulary (nats)."""
    logprob: Float[Tensor, " T"]
    """Log-probability of the target (nats)."""
    entropy: Float[Tensor, " T"]
    """Entropy of the distribution (nats)."""
    grad_logprob: Float[Tensor, " T"]
    """Gradient with respect to the log-probability."""
    grad_entropy: Float[Tensor, " T"] | None
    """Gradient with respect to the entropy; None without `Projection.entropy_grad`."""

    def of_tokens(self, rows: slice) -> TokenGradients:
        """The numbers of the tokens `rows`, as views."""
        return self._changed(lambda values: values[rows])

    def contiguous(self) -> TokenGradients:
        """The numbers as contiguous tensors, which kernels need.

        The gradient of a sum may arrive as one expanded number.
        """
        return self._changed(Tensor.contiguous)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> TokenGradients:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(values) for name, values in tensors.items() if values is not None})


class Backend(Protocol):
    """The computation of a projection: in two passes, which compute the logits twice, or chunk by chunk.

    The projection has at least one token and one column, because `function.Call` asks no backend for an empty one.

    `statistics` and `chunk_statistics` return [4, T] over this rank's columns, in the accumulator's dtype:
    0  m, the maximum of z; finfo.min without columns
    1  r, the sum of exp(z - m) over all columns but the maximum's; -1 without columns
    2  u, the sum of exp(z - m) (z - m)
    3  z of the target if the target is a column of this rank, else finfo.min

    `gradients` and `chunk_gradients` add dz @ weight to grad_hidden [T, H] and dz.T @ hidden to grad_weight [n, H].
    Both are in the accumulator's dtype, and grad_weight may be Megatron's main_grad. The gradient of the logits is

        dz = scale * (grad_logprob (1_target - p) - grad_entropy p (log p + entropy)).
    """

    name: str
    """The backend's name, as the option `backend` states it."""

    def workspace(self, p: Projection) -> int:
        """Smallest workspace (bytes) for `statistics` and `gradients`."""
        ...

    def statistics(self, p: Projection) -> Float[Tensor, "4 T"]:
        """The statistics [4, T] of all tokens."""
        ...

    def gradients(
        self,
        p: Projection,
        token_gradients: TokenGradients,
        grad_hidden: Float[Tensor, "T H"],
        grad_weight: Float[Tensor, "n H"] | None,
    ) -> None:
        """Recomputes the logits, and adds to `grad_hidden` and `grad_weight`. `grad_weight` is None if the weight
        needs no gradient."""
        ...

    def chunk_tokens(self, p: Projection) -> int:
        """Most tokens of a chunk: its logits and the buffers of `chunk_gradients` have to fit the workspace.

        0 if no token fits, or so few that computing the logits twice is faster.
        """
        ...

    def chunk_statistics(self, p: Projection, logits: Float[Tensor, "T n"]) -> Float[Tensor, "4 T"]:
        """The statistics of one chunk. The call leaves the input of `chunk_gradients` in `logits`."""
        ...

    def chunk_gradients(
        self,
        p: Projection,
        logits: Float[Tensor, "T n"],
        stats: Float[Tensor, "4 T"],
        token_gradients: TokenGradients,
        grad_hidden: Float[Tensor, "T H"],
        grad_weight: Float[Tensor, "n H"] | None,
        extra_gradient: Float[Tensor, "T n"] | None = None,
    ) -> None:
        """Adds to `grad_hidden` and `grad_weight` like `gradients`, from the `logits` and `stats` of
        `chunk_statistics`.

        The call may overwrite `logits`. extra_gradient: a further gradient with respect to hidden @ weight.T, which
        is added; only the backend torch takes it.
        """
        ...


def slices(total: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` elements that together cover the range from 0 to `total`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def block_of(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """The start of a flat buffer, viewed as a matrix [rows, columns]."""
    return buffer[: rows * columns].view(rows, columns)


def part_of(values: Tensor | None, rows: slice) -> Tensor | None:
    """A view of some rows of a tensor; None if there is no tensor."""
    if values is None:
        return None
    return values[rows]


def no_columns(tokens: int, like: Tensor, dtype: torch.dtype) -> Float[Tensor, "4 tokens"]:
    """The statistics [4, tokens] of zero columns, with which a merge starts. The maximum is below every logit."""
    stats = like.new_zeros((4, tokens), dtype=dtype)
    stats[0] = torch.finfo(dtype).min
    stats[1] = -1.0
    stats[3] = torch.finfo(dtype).min
    return stats


def merged_statistics(parts: Float[Tensor, "p 4 T"]) -> Float[Tensor, "4 T"]:
    """The statistics of all columns, merged from the statistics of p parts in the order of the parts."""
    m, r, u, target = parts.unbind(1)
    top, owner = m.max(dim=0)
    r_total = torch.zeros_like(top)
    centered = torch.zeros_like(top)
    # A loop fixes the order of the additions, so that every rank gets the same bits. A reduction might not.
    for part in range(m.shape[0]):
        terms = 1.0 + r[part]
        gap = torch.where(terms > 0, m[part] - top, torch.zeros_like(top))
        weight = gap.exp()
        r_total = r_total + torch.where(owner == part, r[part], weight * terms)
        centered = centered + weight * (u[part] + gap * terms)
    return torch.stack([top, r_total, centered, target.amax(dim=0)])


def results(
    stats: Float[Tensor, "4 T"],
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-sum-exp, log-probability of the target, and entropy (nats), from the statistics of the whole vocabulary.

    With s = 1 + r the entropy is log s - u / s, centered on the maximum. The log-sum-exp minus the mean logit would
    lose digits by cancellation.
    """
    top, r_total, centered, target = stats
    log_total = r_total.log1p()
    return top + log_total, (target - top) - log_total, log_total - centered / (1.0 + r_total)

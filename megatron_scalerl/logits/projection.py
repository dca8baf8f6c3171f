"""The interface between the logit projection and the backends.

The life of a projection: `arguments.checked` makes a `function.Call` with a `Projection` of the right shapes; the
autograd function adds the hidden states; a `Backend` returns the statistics [4, T] of this rank's columns;
`merged_statistics` joins the statistics of all ranks, and `results` computes log-probabilities and entropies; in the
backward pass the backend adds to both gradients.

`merged_statistics` is a fixed sequence of operations in the order of the parts, so ranks with the same parts get the
same bits. The maximum's own term is not part of r: log1p(r) keeps the log-probability of a token that is almost
certain.
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
    """This rank's columns of the logits of T tokens, z = scale * hidden @ weight.T, not computed yet."""

    hidden: Float[Tensor, "T H"]
    """Hidden states of the tokens with loss."""
    weight: Float[Tensor, "n H"]
    """In hidden's dtype: this rank's rows of the head without padding; n may be 0."""
    targets: Int64[Tensor, " T"]
    """Ids of the whole vocabulary."""
    scale: Tensor
    """1 / temperature, 0-dimensional in the accumulator's dtype."""
    first: int
    """Id of column 0 in the whole vocabulary."""
    round_logits: bool
    """True rounds hidden @ weight.T to hidden's dtype before the scale, as an engine without an fp32 head does; never
    with fp32 and fp64 operands, which have nothing to round."""
    entropy: bool
    """True: u of the statistics is required; else u may be 0."""
    entropy_grad: bool
    """True: `gradients` gets a gradient of the entropy."""
    grad_logits: GradLogits
    """How the gradient of the logits of a bf16 head enters the GEMMs. "bf16": rounded. "bf16x2": as the sum of two
    bf16 terms for the weight's gradient; hidden's gradient, which ends in bf16, uses the first term. "fp32":
    unrounded, with operands cast to fp32; always with fp32 and fp64 operands."""
    workspace_bytes: int
    """Bound on a backend's allocations: blocks of logits and of gradients, casts of operands, partial sums."""

    @property
    def tokens(self) -> int:
        """T."""
        return self.hidden.shape[0]

    @property
    def count(self) -> int:
        """n, this rank's columns."""
        return self.weight.shape[0]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no token, or no column on this rank."""
        return not self.tokens or not self.count

    @property
    def accumulator(self) -> torch.dtype:
        """fp64 for fp64 input, else fp32: the type of sums, logits and statistics."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def of_tokens(self, rows: slice) -> Projection:
        """The projection of some of the tokens, as views."""
        return replace(self, hidden=self.hidden[rows], targets=self.targets[rows])

    def owned(self, columns: slice) -> tuple[Bool[Tensor, " T"], Int64[Tensor, "T 1"]]:
        """Whether a token's target is in these columns of this rank, and the target's column in the block.

        Where the target is elsewhere, the column is an arbitrary column of the block.
        """
        # Clamped, so that every row may be gathered and scattered: to skip rows the host would have to count rows.
        width = columns.stop - columns.start
        local = self.targets - (self.first + columns.start)
        return (local >= 0) & (local < width), local.clamp(0, width - 1)[:, None]


@record
class TokenGradients:
    """The per-token inputs of `gradients` in the accumulator's dtype."""

    lse: Float[Tensor, " T"]
    """Log-sum-exp over the whole vocabulary (nats)."""
    logprob: Float[Tensor, " T"]
    """Log-probability of the target (nats)."""
    entropy: Float[Tensor, " T"]
    """Entropy of the distribution (nats)."""
    grad_logprob: Float[Tensor, " T"]
    """Gradient of the log-probability."""
    grad_entropy: Float[Tensor, " T"] | None
    """Gradient of the entropy; None without `Projection.entropy_grad`."""

    def of_tokens(self, rows: slice) -> TokenGradients:
        """The inputs of some of the tokens, as views."""
        return self._changed(lambda values: values[rows])

    def contiguous(self) -> TokenGradients:
        """Contiguous copies of the inputs, as kernels need: the gradient of a sum may be one expanded number."""
        return self._changed(Tensor.contiguous)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> TokenGradients:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(values) for name, values in tensors.items() if values is not None})


class Backend(Protocol):
    """The computation of a projection: in two passes (the logits are computed twice) or chunk by chunk (once).

    The projection has at least one token and one column: `function.Call` asks no backend for an empty projection.

    `statistics` and `chunk_statistics` return [4, T] in the accumulator's dtype over this rank's columns:
    0  m, the maximum of z; finfo.min without columns
    1  r, the sum of exp(z - m) over all columns but the maximum's; -1 without columns
    2  u, the sum of exp(z - m) (z - m)
    3  z of the target if the target is a column of this rank, else finfo.min

    `gradients` and `chunk_gradients` add dz @ weight to grad_hidden [T, H] and dz.T @ hidden to grad_weight [n, H],
    both in the accumulator's dtype (grad_weight may be Megatron's main_grad), with

        dz = scale * (grad_logprob (1_target - p) - grad_entropy p (log p + entropy)).
    """

    name: str
    """The value of `backend=`."""

    def workspace(self, p: Projection) -> int:
        """Smallest workspace (bytes) for `statistics` and `gradients`."""
        ...

    def statistics(self, p: Projection) -> Float[Tensor, "4 T"]:
        """The statistics."""
        ...

    def gradients(
        self,
        p: Projection,
        token_gradients: TokenGradients,
        grad_hidden: Float[Tensor, "T H"],
        grad_weight: Float[Tensor, "n H"] | None,
    ) -> None:
        """Recomputes the logits and adds to both gradients; grad_weight None: the weight needs no gradient."""
        ...

    def chunk_tokens(self, p: Projection) -> int:
        """Tokens whose logits over all columns, and the needs of `chunk_gradients`, fit the workspace.

        0: no token fits, or so few tokens that computing the logits twice is faster.
        """
        ...

    def chunk_statistics(self, p: Projection, logits: Float[Tensor, "T n"]) -> Float[Tensor, "4 T"]:
        """The statistics of one chunk; leaves the input of `chunk_gradients` in `logits`."""
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
        """Adds to both gradients as `gradients` does, from the `logits` and `stats` of `chunk_statistics`.

        May overwrite `logits`. extra_gradient: a second gradient of hidden @ weight.T, for the backend torch alone.
        """
        ...


def slices(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover 0 to `total`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def block_of(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """[rows, columns] view of the start of a flat buffer."""
    return buffer[: rows * columns].view(rows, columns)


def part_of(values: Tensor | None, rows: slice) -> Tensor | None:
    """Rows of a tensor as a view; None without a tensor."""
    if values is None:
        return None
    return values[rows]


def no_columns(tokens: int, like: Tensor, dtype: torch.dtype) -> Float[Tensor, "4 tokens"]:
    """The statistics of zero columns, the start of a merge: the maximum is below every logit."""
    stats = like.new_zeros((4, tokens), dtype=dtype)
    stats[0] = torch.finfo(dtype).min
    stats[1] = -1.0
    stats[3] = torch.finfo(dtype).min
    return stats


def merged_statistics(parts: Float[Tensor, "p 4 T"]) -> Float[Tensor, "4 T"]:
    """The statistics of all columns, from the statistics of each part in the order of the parts."""
    m, r, u, target = parts.unbind(1)
    top, owner = m.max(dim=0)
    r_total = torch.zeros_like(top)
    centered = torch.zeros_like(top)
    # A loop in the order of the parts, not a reduction: every rank adds in the same order.
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
    """Log-sum-exp, log-probability of the target and entropy (nats) of the whole vocabulary.

    The entropy log s - u / s is centered on the maximum: lse minus the mean logit would cancel.
    """
    top, r_total, centered, target = stats
    log_total = r_total.log1p()
    return top + log_total, (target - top) - log_total, log_total - centered / (1.0 + r_total)

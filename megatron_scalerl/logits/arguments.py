"""Checks of a projection's arguments, made before any rank waits for another.

Every mistake is a ValueError that names the argument. No check compares ranks, because the trainer compares the
ranks' batches once a step (`trainer.agreement`).
"""

import math
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.logits.choice import BackendName, choose_backend
from megatron_scalerl.logits.function import Call
from megatron_scalerl.logits.projection import Entropy, GradLogits, Precision, Projection
from megatron_scalerl.record import record
from megatron_scalerl.types import Int64

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Types that hidden and weight may have. Values of these types are multiplied exactly."""


@record
class Settings:
    """The options of `api.token_logprobs` and `api.token_loss`."""

    group: dist.ProcessGroup | None = None
    """Tensor-parallel group of size p. All ranks of the group have to pass the same targets, places and options, and
    get the same results bit for bit."""
    logits: Precision = "fp32"
    """Precision of the logits.

    "fp32": the numerics contract of `api` (Khatri et al. 2025, arXiv 2510.13786, section 3.2). "model": logits are
    first rounded to the operands' dtype, as in an engine without an fp32 head."""
    temperature: float = 1.0
    """The logits are divided by this number."""
    entropy: Entropy = "none"
    """"none": entropies are zeros. "metric": entropies have no gradient. "grad": entropies are differentiable."""
    vocab_size: int | None = None
    """True size of the vocabulary (default: all rows). Columns from there on are padding, with probability 0."""
    places: Int64[Tensor, " C"] | None = None
    """Positions of the tokens that are computed, without repetition (default: all). At other positions targets may
    hold anything, and results are 0. Positions are taken instead of a mask, because the host would wait until a GPU
    has counted the mask's tokens."""
    trusted: bool = False
    """True: the caller has already checked the targets, so the call checks no target and reads nothing from the
    device."""
    grad_logits: GradLogits = "bf16"
    """Form in which the gradient of bf16 logits enters the GEMMs, see `Projection.grad_logits`. With fp32 and fp64
    operands the gradient is never rounded."""
    sequence_parallel: bool = False
    """True: `hidden` is this rank's share [T/p, H] of the tokens. The call gathers the shares, and reduce-scatters
    the gradient in fp32."""
    workspace_mb: float = 512.0
    """Bound (MiB) on memory besides inputs, results and gradients. To stay below it, the backward pass recomputes the
    logits."""
    keep_logits: bool = False
    """True: the logits stay in the workspace until the backward pass, if all logits of the call fit. This takes three
    GEMMs instead of four, and suits a caller whose backward pass follows at once. `api.token_loss` keeps no
    logits."""
    backend: BackendName = "auto"
    """"cuda": bf16 and fp32 on an NVIDIA GPU. "torch": all dtypes and devices. "auto": cuda where possible, else
    torch."""


def checked(hidden: Tensor, weight: Tensor, targets: Tensor, settings: Settings) -> Call:
    """The call that the autograd functions execute. Raises ValueError for arguments that do not fit."""
    group = settings.group
    _check_options(settings)
    _check_operands(hidden, weight)
    first = 0
    ranks = 1
    rows = weight.shape[0]
    if group is not None and group.size() > 1:
        first = group.rank() * rows
        ranks = group.size()
    else:
        group = None
    shares = 1
    if settings.sequence_parallel:
        shares = ranks
    tokens = hidden.shape[0] * shares
    _check_tokens(tokens, targets, settings, shares)
    true_size = _true_size(settings.vocab_size, rows, ranks)
    places = settings.places
    # This type is also `Projection.accumulator`. Logits may be rounded only if the operands' type is narrower.
    accumulator = torch.promote_types(hidden.dtype, torch.float32)
    # `full` fills the tensor on the device. Copying the number from the host would make the host wait.
    scale = torch.full((), 1.0 / settings.temperature, dtype=accumulator, device=hidden.device)
    if places is not None:
        targets = targets.index_select(0, places)
    # This check is last, because reading the targets makes the host wait for the device.
    if not settings.trusted:
        _check_targets(targets, places, true_size)
    narrow = hidden.dtype != accumulator
    # `Call.projection` supplies the hidden states later. Until then one row of memory stands for all rows.
    shape = Projection(
        hidden=hidden.new_empty((1, hidden.shape[1])).expand(targets.shape[0], -1),
        weight=weight.detach()[: max(0, true_size - first)],
        targets=targets,
        scale=scale,
        first=first,
        round_logits=narrow and settings.logits == "model",
        entropy=settings.entropy != "none",
        entropy_grad=settings.entropy == "grad",
        grad_logits=settings.grad_logits if narrow else "fp32",
        workspace_bytes=int(settings.workspace_mb * 2**20),
    )
    backend = choose_backend(settings.backend, hidden.device, hidden.dtype)
    need = backend.workspace(shape)
    if shape.workspace_bytes < need:
        mib = math.ceil(need / 2**20 * 1000) / 1000
        raise ValueError(
            f"workspace_mb is {settings.workspace_mb:g}; it has to be at least {mib}, for one block of logits"
        )
    return Call(
        backend=backend,
        group=group,
        sequence_parallel=shares > 1,
        tokens=tokens,
        loss_places=places,
        shape=shape,
        main_grad=_has_main_grad(weight),
        keep_logits=settings.keep_logits and torch.is_grad_enabled(),
    )


def _true_size(vocab_size: int | None, rows: int, ranks: int) -> int:
    """Size of the vocabulary without padding."""
    if vocab_size is None:
        return rows * ranks
    if not 0 < vocab_size <= rows * ranks:
        raise ValueError(
            f"vocab_size is {vocab_size}; it has to be 1 to {rows * ranks} ({rows} rows on {ranks} ranks)"
        )
    return vocab_size


def _check_options(settings: Settings) -> None:
    kinds = {"logits": Precision, "entropy": Entropy, "grad_logits": GradLogits, "backend": BackendName}
    for name, kind in kinds.items():
        value = getattr(settings, name)
        if value not in get_args(kind):
            raise ValueError(f"{name} is {value!r}; it has to be {' or '.join(get_args(kind))}")


def _check_operands(hidden: Tensor, weight: Tensor) -> None:
    kind: Any = weight.dtype
    if type(weight) not in (Tensor, torch.nn.Parameter):
        kind = type(weight).__name__
    if kind not in DTYPES:
        raise ValueError(
            f"weight is {kind}; it has to be a plain tensor in bfloat16, float32 or float64, since a quantized head "
            "has no exact logits"
        )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}; they have to be [T, H] and [V/p, H]"
        )
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        raise ValueError(
            f"weight is {weight.dtype} on {weight.device}, but hidden is {hidden.dtype} on {hidden.device}"
        )


def _check_tokens(tokens: int, targets: Tensor, settings: Settings, shares: int) -> None:
    if list(targets.shape) != [tokens]:
        per_rank = ""
        if shares > 1:
            per_rank = f" ({shares} ranks have {tokens // shares} tokens each)"
        raise ValueError(f"targets is {list(targets.shape)}; it has to be [{tokens}]{per_rank}")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets is {targets.dtype}; it has to be int64")
    places = settings.places
    if places is not None and (places.dim() != 1 or places.dtype != torch.int64):
        raise ValueError(f"places is {list(places.shape)} in {places.dtype}; it has to be [C] in int64")
    if not settings.temperature > 0:
        raise ValueError(f"temperature is {settings.temperature}; it has to be above 0")


def _check_targets(targets: Tensor, places: Tensor | None, vocabulary: int) -> None:
    outside = ((targets < 0) | (targets >= vocabulary)).nonzero()[:, 0]
    if outside.numel():
        first = int(outside[0])
        place = first
        if places is not None:
            place = int(places[first])
        raise ValueError(
            f"targets: id {int(targets[first])} at position {place} is outside the vocabulary of {vocabulary} ids "
            f"(the first of {outside.numel()} invalid ids)"
        )


def _has_main_grad(weight: Tensor) -> bool:
    """Whether the weight has a `main_grad`, the gradient buffer of Megatron's DDP.

    The call then adds the gradient directly to `main_grad`, like Megatron's gradient accumulation fusion.
    """
    grad = getattr(weight, "main_grad", None)
    return (
        isinstance(grad, Tensor)
        and hasattr(weight, "grad_added_to_main_grad")
        and grad.shape == weight.shape
        and grad.dtype in (torch.float32, weight.dtype)
    )

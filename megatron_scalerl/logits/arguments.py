"""Checks of a projection's arguments, before any rank waits for another.

Every mistake is a ValueError that names the argument. In a group the first exchange is a fixed number of integers
per rank: the rank's own error, and what must be equal on all. So all ranks raise the same error. The trainer compares
its batches once a step (`trainer.agreement`) and turns this exchange off with `Settings.trusted`.
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
from megatron_scalerl.types import Bool, Float, Int64

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Types of hidden and weight whose values are multiplied exactly."""
_MESSAGE = 512
"""Longest error message of a rank, in bytes."""
_FACTS = 16
"""Maximum number of values that must be equal on all ranks."""


@record
class Settings:
    """How to project: the options of `api.token_logprobs` and `api.token_loss`."""

    group: dist.ProcessGroup | None = None
    """Tensor-parallel group of size p. Targets, masks and options are the same on all its ranks, and so are the
    results, bit for bit."""
    logits: Precision = "fp32"
    """"fp32": the numerics contract of `api` (Khatri et al. 2025, arXiv 2510.13786, section 3.2). "model": logits are
    first rounded to the operands' dtype, as in an engine without an fp32 head."""
    temperature: float | Float[Tensor, "*T"] = 1.0
    """Divides the logits; one number, or one per token."""
    entropy: Entropy = "none"
    """"none": zeros; "metric": without gradient; "grad": differentiable."""
    vocab_size: int | None = None
    """True size of the vocabulary (default: all rows). Columns from there on are padding, with probability 0."""
    loss_mask: Bool[Tensor, " T"] | None = None
    """True for the tokens that are computed. Elsewhere targets may hold anything, and results are 0."""
    places: Int64[Tensor, " C"] | None = None
    """In place of loss_mask: the positions of its tokens, each once. A host that knows them need not wait
    for a GPU to count a mask."""
    trusted: bool = False
    """True: the caller has checked targets and temperatures, and that all ranks hold the same. Values of tensors are
    then neither checked nor compared, and nothing is read back from the device."""
    grad_logits: GradLogits = "bf16"
    """How the gradient of bf16 logits enters the GEMMs, see `Projection.grad_logits`; fp32 and fp64 keep theirs."""
    sequence_parallel: bool = False
    """hidden is this rank's [T/p, H] share. It is gathered here, and its gradient reduce-scattered in fp32."""
    main_grad: bool | None = None
    """True adds the weight's gradient directly to weight.main_grad, as Megatron's gradient accumulation fusion does;
    None does so where Megatron's DDP has made one; False never."""
    workspace_mb: float = 512.0
    """Bound (MiB) on memory besides inputs, results and gradients: backward recomputes the logits."""
    keep_logits: bool = False
    """True: if all logits of the call fit the workspace, they stay in it until the backward pass: three GEMMs instead
    of four. For a caller whose backward pass follows at once. `api.token_loss` keeps none."""
    backend: BackendName = "auto"
    """cuda (bf16 and fp32 on an NVIDIA GPU), torch (anything anywhere), or auto: cuda where it can run."""


def checked(hidden: Tensor, weight: Tensor, targets: Tensor, settings: Settings) -> Call:
    """The call that the autograd functions execute. Raises ValueError, on all ranks of the group alike."""
    group = settings.group
    if group is not None and group.size() == 1:
        group = None
    if group is None or settings.trusted:
        return _call(hidden, weight, targets, settings, group)
    # A rank with a mistake has to tell the others before they wait for it in a collective.
    call = None
    problem = ""
    facts: dict[str, Tensor | int] = {}
    try:
        call = _call(hidden, weight, targets, settings, group)
        facts = _facts(call, hidden, weight)
    except ValueError as error:
        problem = str(error)
    _agree(group, hidden.device, problem, facts)
    assert call is not None
    return call


def _call(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: Settings, group: dist.ProcessGroup | None
) -> Call:
    _check_options(settings)
    _check_operands(hidden, weight)
    first = 0
    ranks = 1
    rows = weight.shape[0]
    if group is not None:
        first = group.rank() * rows
        ranks = group.size()
    shares = 1
    if settings.sequence_parallel:
        shares = ranks
    tokens = hidden.shape[0] * shares
    _check_tokens(tokens, targets, settings, shares)
    true_size = _true_size(settings.vocab_size, rows, ranks)
    kept = settings.places
    if settings.loss_mask is not None:
        kept = settings.loss_mask.nonzero()[:, 0]
    # The type of sums, as in `Projection.accumulator`; only operands that are narrower are ever rounded.
    accumulator = torch.promote_types(hidden.dtype, torch.float32)
    scale = _scale(settings.temperature, hidden.device, accumulator).detach()
    if kept is not None:
        targets = targets.index_select(0, kept)
        if scale.dim():
            scale = scale.index_select(0, kept)
    # Only now: to look at values the host waits for the device.
    if not settings.trusted:
        _check_targets(targets, kept, true_size)
    narrow = hidden.dtype != accumulator
    # Hidden states come later and may be a share of these: here one row of memory stands for all.
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
        kept=kept,
        shape=shape,
        main_grad=_into_main_grad(weight, settings.main_grad),
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


def _scale(temperature: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """1 / temperature on `device`; a number is filled in there, since the host would wait for a copy."""
    if isinstance(temperature, Tensor):
        return 1.0 / temperature.to(device, dtype)
    return torch.full((), 1.0 / temperature, dtype=dtype, device=device)


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
    mask = settings.loss_mask
    places = settings.places
    if places is not None and mask is not None:
        raise ValueError("places and loss_mask are both set; leave one of them out")
    if places is not None and (places.dim() != 1 or places.dtype != torch.int64):
        raise ValueError(f"places is {list(places.shape)} in {places.dtype}; it has to be [C] in int64")
    if mask is not None and (list(mask.shape) != [tokens] or mask.dtype != torch.bool):
        raise ValueError(f"loss_mask is {list(mask.shape)} in {mask.dtype}; it has to be [{tokens}] in bool")
    temperature = settings.temperature
    if isinstance(temperature, Tensor):
        if list(temperature.shape) not in ([], [tokens]):
            raise ValueError(f"temperature is {list(temperature.shape)}; it has to be a number or [{tokens}]")
        if settings.trusted:
            return
        temperature = temperature.min()
    lowest = float(temperature)
    if not lowest > 0:
        raise ValueError(f"temperature is {lowest}; it has to be above 0")


def _check_targets(targets: Tensor, kept: Tensor | None, vocabulary: int) -> None:
    outside = ((targets < 0) | (targets >= vocabulary)).nonzero()[:, 0]
    if outside.numel():
        first = int(outside[0])
        place = first
        if kept is not None:
            place = int(kept[first])
        raise ValueError(
            f"targets: id {int(targets[first])} at position {place} is outside the vocabulary of {vocabulary} ids "
            f"(the first of {outside.numel()})"
        )


def _into_main_grad(weight: Tensor, requested: bool | None) -> bool:
    """Whether to add to a main_grad that Megatron's DDP has made; `requested` True raises ValueError without one."""
    grad = getattr(weight, "main_grad", None)
    able = (
        isinstance(grad, Tensor)
        and hasattr(weight, "grad_added_to_main_grad")
        and grad.shape == weight.shape
        and grad.dtype in (torch.float32, weight.dtype)
    )
    if requested and not able:
        shape = "none"
        if grad is not None:
            shape = str(list(grad.shape))
        raise ValueError(
            f"main_grad is true, but Megatron's DDP made none for the weight {list(weight.shape)}, which has {shape}"
        )
    return able and requested is not False


def _facts(call: Call, hidden: Tensor, weight: Tensor) -> dict[str, Tensor | int]:
    """Numbers that must be equal on all ranks, by name; contents as checksums that depend on the order."""
    shape = call.shape
    order = torch.arange(1, shape.tokens + 1, device=hidden.device)
    return {
        "tokens": call.tokens,
        "columns of hidden": hidden.shape[1],
        "rows of weight": weight.shape[0],
        "dtype of weight": DTYPES.index(weight.dtype),
        "tokens with loss": shape.tokens,
        "loss_mask": (call.places(hidden.device) * order).sum(),
        # Two primes: a plain sum would be equal for targets in another order.
        "targets": (shape.targets * (order * 2654435761 % 4294967291)).sum(),
        "temperature": (shape.scale.double().expand(order.shape) * order).sum().view(torch.int64),
        "entropy": int(shape.entropy) + int(shape.entropy_grad),
        "logits": int(shape.round_logits),
        "sequence_parallel": int(call.sequence_parallel),
    }


def _agree(group: dist.ProcessGroup, device: torch.device, problem: str, facts: dict[str, Tensor | int]) -> None:
    """Raises ValueError on every rank if one has a problem or two differ."""
    # One message of a fixed size: a rank with a problem has no facts, and the others do not know.
    text = problem.encode()[:_MESSAGE].ljust(_MESSAGE, b"\0")
    values = [int(value) for value in facts.values()]
    mine = torch.tensor([*text, *values, *[0] * (_FACTS - len(values))], device=device)
    everyone = mine.new_empty((group.size(), len(mine)))
    dist.all_gather_into_tensor(everyone.view(-1), mine, group=group)
    rows = everyone.tolist()
    for rank, row in enumerate(rows):
        message = bytes(row[:_MESSAGE]).rstrip(b"\0").decode(errors="replace")
        if message:
            raise ValueError(f"rank {rank} of {group.size()} of the tensor-parallel group: {message}")
    for place, name in enumerate(facts, _MESSAGE):
        values = [row[place] for row in rows]
        if len(set(values)) > 1:
            raise ValueError(f"{name}: the ranks of the tensor-parallel group differ, they have {values}")

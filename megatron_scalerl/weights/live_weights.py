"""Writes parts of Hugging Face tensors straight into an engine's live parameters.

A recorded copy of the loader (`weights.live_map`) is turned into a `LivePart`: which dimension of the parameter runs
along which dimension of the tensor, and over which of its indices. Then any rectangle of the tensor is written in
place, without the loader, without a whole tensor, and at the addresses that captured graphs use.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from megatron_scalerl.models.llama4 import VISION
from megatron_scalerl.weights.changes import Changes
from megatron_scalerl.weights.digest import Along, total
from megatron_scalerl.weights.live_changes import write_changes
from megatron_scalerl.weights.live_map import LivePart, Scatter, needs, record_copies, unwritten
from megatron_scalerl.weights.plan import Manifest, volume
from megatron_scalerl.weights.transport.frames import Values

BLOCK_ROWS = 16
"""Rows of an expert's matrix that vLLM's CPU kernel interleaves."""


def live_parts(
    scatters: Iterable[Scatter],
    manifest: Manifest,
    parameters: Mapping[str, torch.Tensor],
    packed: Set[str] = frozenset(),
) -> dict[str, list[LivePart]]:
    """Tensor -> its parts in live parameters. packed: those whose rows lie in blocks of BLOCK_ROWS.

    Raises NotImplementedError, naming the tensor, for a copy whose dimensions do not run along the tensor's.
    """
    shapes = {meta.name: meta.shape for meta in manifest}
    found: dict[str, list[LivePart]] = {meta.name: [] for meta in manifest}
    for scatter in scatters:
        part = _aligned(scatter, shapes[scatter.tensor], parameters[scatter.parameter])
        of = found[scatter.tensor]
        of += _in_blocks(part, parameters[scatter.parameter]) if scatter.parameter in packed else [part]
    return found


def _aligned(scatter: Scatter, shape: tuple[int, ...], parameter: torch.Tensor) -> LivePart:
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    start, flat = [], scatter.source_offset
    for stride in strides:
        start.append(flat // stride)
        flat %= stride
    long = [place for place, size in enumerate(scatter.shape) if size > 1]  # the others have one index, as `fixed`
    axes: list[int] = []
    for place in long:
        found = _axis_of(scatter.steps[place], start, shape, strides, taken=axes)
        if found is None:
            raise NotImplementedError(
                f"weights: {scatter.tensor}: expected dimension {place} of {scatter.parameter} along one of its own"
            )
        axes.append(found)
    return LivePart(
        tensor=scatter.tensor,
        parameter=scatter.parameter,
        live=scatter.destination(parameter).squeeze(),
        axes=tuple(axes),
        indices=tuple(_along(start[axis] + scatter.steps[place] // strides[axis]) for place, axis in zip(long, axes)),
        fixed={axis: index for axis, index in enumerate(start) if axis not in axes},
    )


def _in_blocks(part: LivePart, parameter: torch.Tensor) -> Iterator[LivePart]:
    """The part of experts [E, N, K] that are held as [E, N / BLOCK_ROWS, K, BLOCK_ROWS], block by block."""
    _, rows, width = parameter.shape
    offset, held = int(part.live.storage_offset()), part.live.stride()
    expert, inside = divmod(offset, rows * width)
    row, column = divmod(inside, width)
    along_rows = [place for place, stride in enumerate(held) if stride == width and width > 1]
    if not set(held) <= {1, width, rows * width} or len(along_rows) > 1 or width == 1:
        raise NotImplementedError(f"weights: {part.tensor}: expected rectangles of {part.parameter}")
    count = part.live.shape[along_rows[0]] if along_rows else 1
    strides = [{1: BLOCK_ROWS, width: 1}.get(stride, stride) for stride in held]
    for block in range(row // BLOCK_ROWS, -(-(row + count) // BLOCK_ROWS)):
        first, end = max(row, block * BLOCK_ROWS), min(row + count, (block + 1) * BLOCK_ROWS)
        shape, indices = list(part.live.shape), list(part.indices)
        for place in along_rows:
            shape[place], indices[place] = end - first, indices[place][first - row : end - row]
        start = expert * rows * width + block * BLOCK_ROWS * width + column * BLOCK_ROWS + first % BLOCK_ROWS
        yield replace(part, live=parameter.data.as_strided(shape, strides, start), indices=tuple(indices))


def _axis_of(
    steps: torch.Tensor, start: list[int], shape: tuple[int, ...], strides: list[int], *, taken: list[int]
) -> int | None:
    """The dimension of the tensor that the steps run along, one that is not taken."""
    for axis, stride in enumerate(strides):
        index = start[axis] + steps // stride
        inside = bool((steps % stride == 0).all()) and int(index.min()) >= 0 and int(index.max()) < shape[axis]
        if inside and axis not in taken:
            return axis
    return None


def _along(index: torch.Tensor) -> Along:
    first, length = int(index[0]), len(index)
    return range(first, first + length) if torch.equal(index, torch.arange(first, first + length)) else index


class LiveWeights:
    """The live parameters of one worker's model, written part by part."""

    def __init__(self, model: Any, manifest: Manifest):
        """Raises NotImplementedError, with the reason, for a model that only its own loader can fill.

        Raises ValueError, by name, for a tensor that the model has no parameter for, a parameter that no tensor
        fills, and one that is filled twice.
        """
        parameters = {n: p for n, p in model.named_parameters() if not n.startswith(VISION)}
        _check_plain(model, parameters)
        packed, before = _packed_experts(model), _sums(parameters)
        scatters = record_copies(model.load_weights, manifest, parameters)
        if changed := [name for name, value in _sums(parameters).items() if value != before[name]]:
            raise NotImplementedError(f"weights: {changed[0]}: expected a loader that only copies, found it changed")
        if wrong := unwritten(scatters, parameters, model):
            [name, *_] = wrong
            raise ValueError(f"weights: expected every value of {name} once, found {wrong[name]}")
        parts = live_parts(scatters, manifest, parameters, packed)
        needed = needs(scatters, manifest)
        self._dtypes = [getattr(torch, meta.dtype) for meta in manifest]
        for (name, of), dtype in zip(parts.items(), self._dtypes):
            if any(torch.promote_types(part.live.dtype, dtype) != part.live.dtype for part in of):
                raise NotImplementedError(f"weights: {name}: expected parameters that hold all values of {dtype}")
            held, once = sum(part.live.numel() for part in of), sum(map(volume, needed[name]))
            if held != once:
                raise NotImplementedError(f"weights: {name}: expected {once} values to be held once, found {held}")
        self.needs = tuple(needed[meta.name] for meta in manifest)
        names = {parameter.data_ptr(): name for name, parameter in parameters.items()}
        linear = [layer for layer in model.modules() if hasattr(layer, "cpu_linear") and layer.weight.dim() == 2]
        # by address: a tied head has the embedding's weights, under no name of its own
        self._packed = [(names.get(layer.weight.data_ptr()), layer) for layer in linear]
        self._parts = [parts[meta.name] for meta in manifest]
        self._written: set[int] = set()

    def write(self, part: Values | list[Changes]) -> None:
        """Write a rectangle of a tensor, or some elements of several."""
        if isinstance(part, list):
            self._written |= {changes.tensor for changes in part}
            write_changes([(self._parts[changes.tensor], changes) for changes in part])
            return
        self._written.add(part.tensor)
        for each in self._parts[part.tensor]:
            each.write(part.ranges, part.values)

    def finish(self) -> None:
        """On CPUs, make the copies again that linear layers compute with, packed for oneDNN: of layers written to."""
        from vllm.model_executor.layers import utils

        written = {part.parameter for number in self._written for part in self._parts[number]}
        for name, layer in self._packed:
            if name is None or name in written:
                utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        self._written = set()

    def digest(self) -> int:
        """Digest of all values (`weights.digest.value_digest`), read where the model reads them."""
        each = zip(self._parts, self._dtypes)
        return total([part.digest(number, dtype) for number, (of, dtype) in enumerate(each) for part in of])


def _check_plain(model: Any, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise NotImplementedError for a quantized model: its loader changes values."""
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotImplementedError(f"weights: {name}: expected plain floats, found {parameter.dtype}")
    for name, layer in model.named_modules():
        method = type(getattr(layer, "quant_method", None)).__name__
        if method != "NoneType" and not method.startswith("Unquantized"):
            raise NotImplementedError(f"weights: {name}: expected weights that are not quantized, found {method}")


def _sums(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Parameter -> the sum of its bits, to see whether something was written."""
    bits = {2: torch.int16, 4: torch.int32}
    return {n: int(p.detach().view(bits[p.element_size()]).sum(dtype=torch.int64)) for n, p in parameters.items()}


def _packed_experts(model: Any) -> set[str]:
    """Names of the expert weights in blocks. Raises NotImplementedError where a kernel's order is not known."""
    found = set()
    for prefix, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is None:
            continue
        experts = kernel.fused_experts
        if layer.w13_weight.device.type != "cpu":
            backend = str(getattr(layer.quant_method, "unquantized_backend", "unknown"))
            if not backend.upper().endswith("TRITON"):
                raise NotImplementedError(f"weights: {prefix}: expected experts in their own order, found {backend}")
            continue
        plain = getattr(experts, "_use_zentorch", False)
        if plain or getattr(experts, "isa", None) != "vec" or not _rows_lie_in_blocks(layer.w13_weight.dtype):
            raise NotImplementedError(
                f"weights: {prefix}: expected experts in blocks, found {type(experts).__name__}"
            )
        found |= {f"{prefix}.{key}" for key in ("w13_weight", "w2_weight")}
    return found


@cache
def _rows_lie_in_blocks(dtype: torch.dtype) -> bool:
    """Whether vLLM's CPU kernel holds [E, N, K] as [E, N / BLOCK_ROWS, K, BLOCK_ROWS]: found by packing numbers."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    plain = (torch.arange(2 * 64 * 32) % 251).view(2, 64, 32).to(dtype)  # exact in bfloat16
    blocks = plain.view(2, 64 // BLOCK_ROWS, BLOCK_ROWS, 32).transpose(2, 3)
    return torch.equal(cpu_prepack_moe_weight(plain, "vec").flatten(), blocks.flatten())

"""Writes parts of Hugging Face tensors straight into an engine's live parameters.

A recorded copy of the loader (`engine.live_map`) is turned into a `LivePart`: which dimension of the parameter runs
along which dimension of the tensor, and over which of its indices. Then any rectangle of the tensor is written in
place, without the loader, without a whole tensor, and at the addresses that captured graphs use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_scalerl.engine.live_map import Scatter, needs, record, unwritten
from megatron_scalerl.models.llama4 import VISION
from megatron_scalerl.weights.plan import Manifest
from megatron_scalerl.weights.rectangles import Ranges

Along = range | torch.Tensor
"""The tensor's index at each place of a dimension: a range of step 1, or [n] int64 in any order."""


@dataclass(frozen=True, kw_only=True)
class LivePart:
    """A part of a tensor, as a view of a live parameter holds it."""

    tensor: str
    """Name in the Hugging Face checkpoint."""
    parameter: str
    """Name in the engine's model."""
    live: torch.Tensor
    """The view; its dimension d runs along dimension `axes[d]` of the tensor."""
    axes: tuple[int, ...]
    indices: tuple[Along, ...]
    """[live.shape[d]] the tensor's index at each place of dimension d."""
    fixed: Mapping[int, int]
    """The tensor's other dimensions -> their index."""

    def write(self, ranges: Ranges, values: torch.Tensor) -> None:
        """Write what a rectangle of the tensor has for this part. values: of the rectangle's shape."""
        if any(not ranges[axis][0] <= at < ranges[axis][1] for axis, at in self.fixed.items()):
            return
        target, source = self.live, values
        for axis in sorted(self.fixed, reverse=True):
            source = source.select(axis, self.fixed[axis] - ranges[axis][0])
        kept = sorted(self.axes)
        source = source.permute([kept.index(axis) for axis in self.axes])
        scattered: dict[int, torch.Tensor] = {}
        for place, (axis, along) in enumerate(zip(self.axes, self.indices)):
            first, end = ranges[axis]
            if isinstance(along, range):
                a, b = max(along.start, first), min(along.stop, end)
                if a >= b:
                    return
                target = target.narrow(place, a - along.start, b - a)
                source = source.narrow(place, a - first, b - a)
            else:
                scattered[place] = ((along >= first) & (along < end)).nonzero().flatten()
                there = along[scattered[place]] - first
                source = source.index_select(place, there.to(source.device))
        if not scattered:
            target.copy_(source)
        elif len(scattered) == 1:
            [(place, here)] = scattered.items()
            target.index_copy_(place, here.to(target.device), source.to(target.dtype))
        else:
            places = [scattered.get(place, torch.arange(size)) for place, size in enumerate(target.shape)]
            mesh = torch.meshgrid(*places, indexing="ij")
            target[tuple(each.to(target.device) for each in mesh)] = source.to(target.dtype)


def live_parts(
    scatters: Iterable[Scatter], manifest: Manifest, parameters: Mapping[str, torch.Tensor]
) -> dict[str, list[LivePart]]:
    """Tensor -> its parts in live parameters.

    Raises NotImplementedError, naming the tensor, for a copy whose dimensions do not run along the tensor's.
    """
    shapes = {meta.name: meta.shape for meta in manifest}
    found: dict[str, list[LivePart]] = {meta.name: [] for meta in manifest}
    for scatter in scatters:
        part = _aligned(scatter, shapes[scatter.tensor], parameters[scatter.parameter])
        found[scatter.tensor].append(part)
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
    live = scatter.destination(parameter).squeeze()
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
        live=live,
        axes=tuple(axes),
        indices=tuple(_along(start[axis] + scatter.steps[place] // strides[axis]) for place, axis in zip(long, axes)),
        fixed={axis: index for axis, index in enumerate(start) if axis not in axes},
    )


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

    def __init__(self, model: Any, manifest: Manifest) -> None:
        """Raises NotImplementedError, with the reason, for a model that only its own loader can fill.

        Raises ValueError, by name, for a tensor that the model has no parameter for, a parameter that no tensor
        fills, and one that is filled twice.
        """
        parameters = {n: p for n, p in model.named_parameters() if not n.startswith(VISION)}
        self._packed = _packed_experts(model, parameters)
        plain = {name: experts.plain for name, experts in self._packed.items()}
        scatters = record(model.load_weights, manifest, parameters)
        if wrong := unwritten(scatters, parameters, model):
            [name, *_] = wrong
            raise ValueError(f"weights: expected every value of {name} once, found {wrong[name]}")
        self._parts = live_parts(scatters, manifest, {**parameters, **plain})
        self.needs = tuple(needs(scatters, manifest)[meta.name] for meta in manifest)
        self._names = [meta.name for meta in manifest]
        self._changed: set[str] = set()

    def write(self, tensor: int, ranges: Ranges, values: torch.Tensor) -> None:
        """Write a rectangle of a tensor, by its number in the manifest."""
        for part in self._parts[self._names[tensor]]:
            part.write(ranges, values)
            if part.parameter in self._packed:
                self._changed.add(part.parameter)

    def finish(self) -> None:
        """Pack what a kernel holds in another order, where it was changed."""
        for name in sorted(self._changed):
            self._packed[name].pack()
        self._changed = set()


@dataclass(frozen=True, kw_only=True)
class _PackedExperts:
    """Expert weights that vLLM's CPU kernel holds in blocks, and the same in order."""

    live: torch.nn.Parameter
    plain: torch.Tensor
    isa: str
    """Of the kernel."""

    def pack(self) -> None:
        """Copy the plain weights into the live ones."""
        from vllm._custom_ops import cpu_prepack_moe_weight

        self.live.data.copy_(cpu_prepack_moe_weight(self.plain, self.isa))


def _packed_experts(model: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, _PackedExperts]:
    """Parameter -> experts that are packed. Raises NotImplementedError where a kernel's order is not known."""
    found: dict[str, _PackedExperts] = {}
    for prefix, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is None:
            continue
        experts = kernel.fused_experts
        isa = getattr(experts, "isa", None)
        if layer.w13_weight.device.type != "cpu":
            backend = str(getattr(layer.quant_method, "unquantized_backend", "unknown"))
            if not backend.upper().endswith("TRITON"):
                raise NotImplementedError(f"weights: {prefix}: expected experts in their own order, found {backend}")
            continue
        if isa is None or getattr(experts, "_use_zentorch", False):
            raise NotImplementedError(
                f"weights: {prefix}: expected vLLM's CPU kernel, found {type(experts).__name__}"
            )
        for key in ("w13_weight", "w2_weight"):
            live = getattr(layer, key)
            found[f"{prefix}.{key}"] = _PackedExperts(live=live, plain=torch.empty_like(live.data), isa=isa)
    return found

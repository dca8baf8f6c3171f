"""Writes rectangles of Hugging Face tensors straight into an engine's live parameters.

Life of the live weights of a worker:

    create     once for a manifest: `LiveWeights` records the loader's copies (`weights.live_map`), turns each copy
               into a `LiveView`, and checks that the views hold every value of the model once
    write      each update's rectangles and changes go into the views, without the loader and without a whole tensor
    finish     vLLM prepares written layers for the kernels again: on CPUs weights are packed, and latent attention
               gets copies of kv_b_proj
    digest     the views are read, in the memory that the model reads

A view tells which dimension of the parameter runs along which dimension of the tensor, and over which indices. Values
are written at unchanged addresses, which captured graphs use.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_scalerl.models.llama4 import VISION
from megatron_scalerl.weights.digest import Along, total
from megatron_scalerl.weights.live_changes import write_changes
from megatron_scalerl.weights.live_map import LiveView, Scatter, needs, record_copies, unfilled_parameters
from megatron_scalerl.weights.plan import Manifest, volume
from megatron_scalerl.weights.transport.frames import Payload

BLOCK_ROWS = 16
"""Number of rows of an expert's matrix that vLLM's CPU kernel stores as one block, interleaved."""


def live_views(
    scatters: Iterable[Scatter],
    manifest: Manifest,
    parameters: Mapping[str, Tensor],
    packed: Set[str] = frozenset(),
) -> dict[str, list[LiveView]]:
    """Tensor -> the tensor's views in live parameters. packed: names of parameters whose rows lie in blocks of
    BLOCK_ROWS.

    Raises NotImplementedError, naming the tensor, for a copy with a dimension that runs along no dimension of the
    tensor.
    """
    shapes = {meta.name: meta.shape for meta in manifest}
    views: dict[str, list[LiveView]] = {meta.name: [] for meta in manifest}
    for scatter in scatters:
        parameter = parameters[scatter.parameter]
        view = _aligned_view(scatter, shapes[scatter.tensor], parameter)
        if scatter.parameter in packed:
            views[scatter.tensor] += _in_blocks(view, parameter)
        else:
            views[scatter.tensor].append(view)
    return views


def _aligned_view(scatter: Scatter, shape: tuple[int, ...], parameter: Tensor) -> LiveView:
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start = [int(index) for index in np.unravel_index(scatter.source_offset, shape)]
    # A dimension with one element runs along no axis; the element's index is in `fixed`.
    dims = [dim for dim, size in enumerate(scatter.shape) if size > 1]
    axes: list[int] = []
    for dim in dims:
        axis = _axis_of(scatter.steps[dim], start, shape, strides, taken_axes=axes)
        if axis is None:
            raise NotImplementedError(
                f"weights: {scatter.tensor}: dimension {dim} of {scatter.parameter} fits no dimension of this tensor"
            )
        axes.append(axis)
    return LiveView(
        tensor=scatter.tensor,
        parameter=scatter.parameter,
        live=scatter.destination(parameter).squeeze(),
        axes=tuple(axes),
        indices=tuple(
            _indices_along(start[axis] + scatter.steps[dim] // strides[axis]) for dim, axis in zip(dims, axes)
        ),
        fixed={axis: index for axis, index in enumerate(start) if axis not in axes},
    )


def _in_blocks(view: LiveView, parameter: Tensor) -> Iterator[LiveView]:
    """Split a view of experts that vLLM has packed into one view for each block of rows.

    The experts' shape is [E, N, K]; the packed shape is [E, N / BLOCK_ROWS, K, BLOCK_ROWS].
    """
    _, rows, width = parameter.shape
    unpacked_strides = view.live.stride()
    expert, inside = divmod(int(view.live.storage_offset()), rows * width)
    row, column = divmod(inside, width)
    row_dims = [dim for dim, stride in enumerate(unpacked_strides) if stride == width]
    if not set(unpacked_strides) <= {1, width, rows * width} or len(row_dims) > 1 or width == 1:
        raise NotImplementedError(
            f"weights: {view.tensor}: the strides of the copy into {view.parameter} fit no rows and columns"
        )
    end_row = row + prod(view.live.shape[dim] for dim in row_dims)
    # Inside a block the rows are the innermost dimension, and columns are BLOCK_ROWS elements apart.
    strides = [{1: BLOCK_ROWS, width: 1}.get(stride, stride) for stride in unpacked_strides]
    for block_row in range(row - row % BLOCK_ROWS, end_row, BLOCK_ROWS):
        first = max(row, block_row)
        end = min(end_row, block_row + BLOCK_ROWS)
        shape = list(view.live.shape)
        indices = list(view.indices)
        for dim in row_dims:
            shape[dim] = end - first
            indices[dim] = indices[dim][first - row : end - row]
        start = (expert * rows + block_row) * width + column * BLOCK_ROWS + first % BLOCK_ROWS
        yield replace(view, live=parameter.data.as_strided(shape, strides, start), indices=tuple(indices))


def _axis_of(
    steps: Tensor, start: list[int], shape: tuple[int, ...], strides: list[int], *, taken_axes: list[int]
) -> int | None:
    """The dimension of the tensor along which `steps` run; None if the steps fit no dimension outside of
    `taken_axes`."""
    for axis, stride in enumerate(strides):
        index = start[axis] + steps // stride
        inside = int(index.min()) >= 0 and int(index.max()) < shape[axis]
        if inside and axis not in taken_axes and bool((steps % stride == 0).all()):
            return axis
    return None


def _indices_along(index: Tensor) -> Along:
    first = int(index[0])
    index_range = range(first, first + len(index))
    return index_range if torch.equal(index, torch.arange(index_range.start, index_range.stop)) else index


class LiveWeights:
    """The parameters of one worker's running model, which weight updates write in place."""

    def __init__(self, model: Any, manifest: Manifest):
        """Record the loader's copies and make the views.

        Raises NotImplementedError, with the reason, for a model that only vLLM's loader can fill. Raises ValueError,
        with a name, for a tensor without a parameter in the model, and for a parameter that no tensor fills or that
        two tensors fill.
        """
        parameters = {n: p for n, p in model.named_parameters() if not n.startswith(VISION)}
        # Where vLLM has no class for a model, transformers' modules are served, which hold a router's bias as a
        # buffer.
        parameters |= {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
        latent = [layer for layer in model.modules() if hasattr(layer, "W_UV")]
        # vLLM makes these parameters from kv_b_proj, as copies or views, so no tensor fills them.
        absorbed_ids = {id(p) for layer in latent for p in layer.parameters(recurse=False)}
        parameters = {n: p for n, p in parameters.items() if id(p) not in absorbed_ids}
        _check_unquantized(model, parameters)
        packed = _packed_experts(model)
        sums = _sums(parameters)
        scatters = record_copies(model.load_weights, manifest, parameters)
        # All copies were only recorded, so a changed parameter means that the loader computes values instead of
        # copying them.
        if changed_names := [name for name, value in _sums(parameters).items() if value != sums[name]]:
            raise NotImplementedError(
                f"weights: {changed_names[0]}: the loader does more than copy: this parameter changed in a dry run"
            )
        if problems := unfilled_parameters(scatters, parameters, model):
            [name, *_] = problems
            raise ValueError(f"weights: the checkpoint does not fill {name} exactly once: {problems[name]}")
        by_tensor = live_views(scatters, manifest, parameters, packed)
        rectangles = needs(scatters, manifest)
        self._dtypes = [getattr(torch, meta.dtype) for meta in manifest]
        for (name, views), dtype in zip(by_tensor.items(), self._dtypes):
            if any(torch.promote_types(view.live.dtype, dtype) != view.live.dtype for view in views):
                raise NotImplementedError(f"weights: {name}: the parameter's type cannot hold all values of {dtype}")
            count = sum(view.live.numel() for view in views)
            read = sum(map(volume, rectangles[name]))
            if count != read:
                raise NotImplementedError(
                    f"weights: {name}: the loader reads {read} values of this tensor, but writes {count} values"
                )
        self.needs = tuple(rectangles[meta.name] for meta in manifest)
        names = {parameter.data_ptr(): name for name, parameter in parameters.items()}
        linear = [layer for layer in model.modules() if hasattr(layer, "cpu_linear") and layer.weight.dim() == 2]
        # Names are found by address: a tied head has the embedding's weights, and no name in named_parameters.
        self._packed = [(names.get(layer.weight.data_ptr()), layer) for layer in linear]
        self._latent = [(names[layer.kv_b_proj.weight.data_ptr()], layer) for layer in latent]
        self._views = [by_tensor[meta.name] for meta in manifest]
        self._written_tensors: set[int] = set()
        """Numbers of the tensors that were written since the last `finish`."""

    def write(self, payload: Payload) -> None:
        """Write a rectangle of a tensor, or changed elements of several tensors."""
        if isinstance(payload, list):
            self._written_tensors |= {changes.tensor for changes in payload}
            write_changes([(self._views[changes.tensor], changes) for changes in payload])
            return
        self._written_tensors.add(payload.tensor)
        for view in self._views[payload.tensor]:
            view.write(payload.ranges, payload.values)

    def finish(self) -> None:
        """Prepare the layers whose weights were written.

        On CPUs oneDNN computes with packed copies of linear layers' weights. Latent attention decodes with two parts
        of kv_b_proj, which vLLM's MLAAttention copies to unchanged addresses.
        """
        from vllm.model_executor.layers import utils

        written_parameters = {view.parameter for number in self._written_tensors for view in self._views[number]}
        for name, layer in self._packed:
            if name is None or name in written_parameters:
                utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        for name, layer in self._latent:
            # The call gathers W_UK_T_dcp_qrep in a context-parallel group, so all workers of the group need the call.
            if name in written_parameters or layer.W_UK_T_dcp_qrep is not None:
                layer.process_weights_after_loading(layer.W_UV.dtype)
        self._written_tensors = set()

    def digest(self) -> int:
        """Digest of all values (`weights.digest.value_digest`), read from the model's memory."""
        digests = []
        for number, (views, dtype) in enumerate(zip(self._views, self._dtypes)):
            digests += [view.digest(number, dtype) for view in views]
        return total(digests)


def _check_unquantized(model: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raise NotImplementedError for a quantized model, whose loader changes values."""
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotImplementedError(
                f"weights: {name}: the type is {parameter.dtype}, not float32, bfloat16 or float16"
            )
    for name, layer in model.named_modules():
        method = type(getattr(layer, "quant_method", None)).__name__
        if method != "NoneType" and not method.startswith("Unquantized"):
            raise NotImplementedError(f"weights: {name}: the weights of this layer are quantized ({method})")


def _sums(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Parameter -> the sum of all values' bits. A changed sum shows that the loader wrote computed values."""
    bits = {2: torch.int16, 4: torch.int32}
    return {n: int(p.detach().view(bits[p.element_size()]).sum(dtype=torch.int64)) for n, p in parameters.items()}


def _packed_experts(model: Any) -> set[str]:
    """Names of the expert weights that vLLM's CPU kernel keeps in blocks of BLOCK_ROWS rows.

    Raises NotImplementedError if the layer's kernel for experts keeps weights in an unknown layout.
    """
    names = set()
    for prefix, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is None:
            continue
        experts = kernel.fused_experts
        if layer.w13_weight.device.type != "cpu":
            backend = str(getattr(layer.quant_method, "unquantized_backend", "unknown"))
            if not backend.upper().endswith("TRITON"):
                raise NotImplementedError(f"weights: {prefix}: no layout of expert weights in {backend} is known")
            continue
        in_blocks = getattr(experts, "isa", None) == "vec" and not getattr(experts, "_use_zentorch", False)
        if not in_blocks or not _rows_lie_in_blocks(layer.w13_weight.dtype):
            raise NotImplementedError(
                f"weights: {prefix}: no layout of expert weights in {type(experts).__name__} is known"
            )
        names |= {f"{prefix}.w13_weight", f"{prefix}.w2_weight"}
    return names


@cache
def _rows_lie_in_blocks(dtype: torch.dtype) -> bool:
    """Whether vLLM's CPU kernel packs [E, N, K] as [E, N / BLOCK_ROWS, K, BLOCK_ROWS], found by calling the
    kernel."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    # All numbers are below 251, which bfloat16 holds exactly.
    unpacked_weights = (torch.arange(2 * 64 * 32) % 251).view(2, 64, 32).to(dtype)
    blocks = unpacked_weights.view(2, 64 // BLOCK_ROWS, BLOCK_ROWS, 32).transpose(2, 3)
    return torch.equal(cpu_prepack_moe_weight(unpacked_weights, "vec").flatten(), blocks.flatten())

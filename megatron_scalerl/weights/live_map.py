"""The map from the elements of Hugging Face tensors to an engine's live parameters, learned from the model's loader.

The loader is called once with recording tensors, which have names, shapes and types and no values. Every function
that cuts, chunks, transposes or permutes a recording tensor is followed. The final copy into a parameter becomes a
`Scatter`, and no value moves. Afterwards updates write weights without the loader, and the map says which rectangles
of each tensor an engine needs in any parallel layout.

Life of the map, once per model and then in each update:

    record      `record_copies` calls load_weights with _Recording tensors and makes a `Scatter` of each copy
    needs       when an engine connects, each worker names the rectangles that the scatters read
    align       `weights.live_weights` makes a `LiveView` of a scatter: a view of the parameter, and the view's
                indices in the tensor
    write       an arriving rectangle of a tensor is written into the tensor's views
    digest      the views are read, and the digest is compared with the sender's

A _Recording is a view of a meta tensor while offset and strides tell where the elements lie. A function that has to
copy (a reshape after a transposition, cat) returns a _Recording with an index of all elements, which takes memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_scalerl.record import record
from megatron_scalerl.weights.digest import Along, at, mixed, value_digest
from megatron_scalerl.weights.plan import Manifest, Ranges, merged_rectangles

Load = Callable[[Iterable[tuple[str, Tensor]]], Any]
"""The load_weights method of an engine's model, which takes (name, tensor) pairs."""
Copied = Callable[["_Recording", Tensor], None]
"""A function that is called for each copy of the loader, with the source and the destination."""
_IDENTITIES = {"contiguous", "to", "cpu", "clone", "detach", "requires_grad_"}
"""Functions that leave every element in place."""
_FOLLOWED_FUNCTIONS = {
    *_IDENTITIES,
    *("view", "reshape", "flatten", "unflatten", "ravel", "transpose", "swapaxes", "swapdims", "permute", "t", "T"),
    *("movedim", "moveaxis", "narrow", "chunk", "split", "tensor_split", "unbind", "select", "__getitem__"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "view_as", "as_strided"),
    *("index_select", "cat", "stack", "repeat_interleave"),
    *("__get__", "__len__", "size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("is_contiguous", "is_floating_point"),
}
"""Functions that only move elements, or tell a tensor's layout. A loader that calls any other function is refused."""


@record
class Scatter:
    """A copy that the loader makes: elements of a tensor, and the destination in a parameter.

    Element (i, j, ...) of the copy is element `source_offset` + steps[0][i] + steps[1][j] + ... of the flat tensor.
    """

    tensor: str
    """Name of the tensor in the Hugging Face checkpoint."""
    parameter: str
    """Name of the parameter in the engine's model."""
    shape: tuple[int, ...]
    offset: int
    """Position of the destination's first element in the parameter's storage."""
    stride: tuple[int, ...]
    """Strides of the destination, in elements."""
    source_offset: int
    steps: tuple[Tensor, ...] = field(repr=False)
    """[shape[d]] int64 for each dimension d: distance of each index's element from `source_offset` in the flat
    tensor."""

    def destination(self, parameter: Tensor) -> Tensor:
        """The destination as a view of the parameter's storage."""
        return parameter.data.as_strided(self.shape, self.stride, self.offset)

    def source_rectangle(self, shape: tuple[int, ...]) -> Ranges:
        """The smallest rectangle with all elements that the copy reads. shape: the whole tensor's shape."""
        first = [int(index) for index in np.unravel_index(self.source_offset, shape)]
        minima = [*first]
        maxima = [*first]
        for steps in self.steps:
            # The offset is added before the steps are unraveled: steps may be negative, as after a swap of two
            # halves.
            for axis, positions in enumerate(torch.unravel_index(self.source_offset + steps, shape)):
                minima[axis] += int(positions.min()) - first[axis]
                maxima[axis] += int(positions.max()) - first[axis]
        assert all(0 <= a <= b < n for a, b, n in zip(minima, maxima, shape)), f"{self.tensor} is read beyond {shape}"
        return tuple((a, b + 1) for a, b in zip(minima, maxima))


@record
class LiveView:
    """A view of a live parameter that holds elements of a tensor."""

    tensor: str
    """Name of the tensor in the Hugging Face checkpoint."""
    parameter: str
    """Name of the parameter in the engine's model."""
    live: Tensor
    """The view of the parameter. Dimension d of the view runs along dimension `axes[d]` of the tensor."""
    axes: tuple[int, ...]
    indices: tuple[Along, ...]
    """[live.shape[d]] for each dimension d of the view: the tensor's index at each position."""
    fixed: Mapping[int, int]
    """Dimension of the tensor that is not in `axes` -> the one index that the view has there."""

    def write(self, ranges: Ranges, values: Tensor) -> None:
        """Write those elements of a rectangle that are in this view. values: in the rectangle's shape."""
        if any(not ranges[axis][0] <= index < ranges[axis][1] for axis, index in self.fixed.items()):
            return
        target = self.live
        source = values
        # The last axis comes first, so that the numbers of earlier axes stay the same.
        for axis in sorted(self.fixed, reverse=True):
            source = source.select(axis, self.fixed[axis] - ranges[axis][0])
        sorted_axes = sorted(self.axes)
        source = source.permute([sorted_axes.index(axis) for axis in self.axes])
        scattered = {}
        for dim, (axis, along) in enumerate(zip(self.axes, self.indices)):
            first, end = ranges[axis]
            if isinstance(along, range):
                common_first = max(along.start, first)
                size = min(along.stop, end) - common_first
                if size <= 0:
                    return
                target = target.narrow(dim, common_first - along.start, size)
                source = source.narrow(dim, common_first - first, size)
            else:
                scattered[dim] = ((along >= first) & (along < end)).nonzero().flatten()
                rows = along[scattered[dim]] - first
                source = source.index_select(dim, rows.to(source.device))
        if not scattered:
            target.copy_(source)
        elif len(scattered) == 1:
            [(dim, positions)] = scattered.items()
            target.index_copy_(dim, positions.to(target.device), source.to(target))
        else:
            by_dim = [scattered.get(dim, torch.arange(size)) for dim, size in enumerate(target.shape)]
            mesh = torch.meshgrid(*by_dim, indexing="ij")
            target[tuple(grid.to(target.device) for grid in mesh)] = source.to(target)

    def digest(self, number: int, dtype: torch.dtype) -> int:
        """Digest of the view's present values. number, dtype: of the tensor in the manifest.

        The model may hold the parameter in a wider type. Values that the tensor's type cannot hold give a digest that
        no sender is likely to have.
        """
        values = self.live.to(dtype)
        if values is not self.live and not torch.equal(values.to(self.live.dtype), self.live):
            return mixed(number) | 1
        view_digest = value_digest(values, number, self.axes, self.indices)
        for axis, index in self.fixed.items():
            view_digest *= at(axis, index)
        return view_digest


def record_copies(load: Load, manifest: Manifest, parameters: Mapping[str, Tensor]) -> list[Scatter]:
    """The copies that `load` would make of the manifest's tensors into `parameters`; no value is copied.

    Raises NotImplementedError, naming tensor and function, for a function that cannot be followed. Raises ValueError
    for a tensor that `load` refuses.
    """
    scatters = []
    # A loader copies into views of parameters, which share the parameters' storage.
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in parameters.items() if tensor.numel()}

    def copied(source: "_Recording", destination: Tensor) -> None:
        parameter = names.get(destination.untyped_storage().data_ptr())
        if parameter is None:
            raise NotImplementedError(
                f"weights: {source.hf_name}: the loader copies this tensor into memory that belongs to no parameter"
            )
        offset, steps = source.steps_in(tuple(destination.shape))
        scatters.append(
            Scatter(
                tensor=source.hf_name,
                parameter=parameter,
                shape=tuple(destination.shape),
                offset=int(destination.storage_offset()),
                stride=tuple(destination.stride()),
                source_offset=offset,
                steps=steps,
            )
        )

    name = "the manifest's first tensor"

    def recordings() -> Iterator[tuple[str, Tensor]]:
        # Error messages name the tensor that the loader is reading.
        nonlocal name
        for meta in manifest:
            name = meta.name
            empty = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            recording = empty.as_subclass(_Recording)
            recording.hf_name = name
            recording.on_copy = copied
            yield name, recording

    try:
        load(recordings())
    except (KeyError, ValueError) as error:
        line = f"{type(error).__name__}: {error}"
        raise ValueError(f"weights: the engine's model refuses tensor {name}: {line}") from error
    except NotImplementedError:
        # The next clause catches RuntimeError, of which NotImplementedError is a subclass.
        raise
    except (RuntimeError, AttributeError, IndexError, TypeError, AssertionError) as error:
        line = f"{type(error).__name__}: {error}"
        raise NotImplementedError(f"weights: {name}: the loader's copies cannot be recorded: {line}") from error
    return scatters


def unfilled_parameters(
    scatters: Iterable[Scatter], parameters: Mapping[str, Tensor], model: torch.nn.Module
) -> dict[str, str]:
    """Parameter -> the problem, for each parameter of which a value is not written exactly once. Padding may stay
    unwritten."""
    write_counts = dict.fromkeys(parameters, 0)
    for scatter in scatters:
        write_counts[scatter.parameter] += prod(scatter.shape)
    problems = {}
    for name, parameter in parameters.items():
        prefix, _, key = name.rpartition(".")
        gap = parameter.numel() - write_counts[name] - _padding(model.get_submodule(prefix), key, parameter)
        if gap > 0:
            problems[name] = f"{gap} values are missing"
        elif gap < 0:
            problems[name] = f"{-gap} values are written twice"
    return problems


def _padding(layer: Any, key: str, parameter: Tensor) -> int:
    """Number of padding values that vLLM adds to a layer's parameter, and that no checkpoint has."""
    # Only the layers of a vocabulary have `shard_indices`.
    indices = getattr(layer, "shard_indices", None)
    if indices is not None:
        rows = indices.num_elements_padded - indices.num_org_elements - indices.num_added_elements
        return rows * (parameter.numel() // indices.num_elements_padded)
    experts = getattr(getattr(layer, "quant_method", None), "moe", None)
    if experts is not None and key in ("w13_weight", "w2_weight"):
        matrix = experts.hidden_dim_unpadded * experts.intermediate_size_per_partition_unpadded
        if key == "w13_weight" and experts.is_act_and_mul:
            matrix *= 2  # two matrices: gate and up projection
        return parameter.numel() - parameter.shape[0] * matrix
    return 0


def needs(scatters: Iterable[Scatter], manifest: Manifest) -> dict[str, tuple[Ranges, ...]]:
    """Tensor -> the disjoint rectangles that the scatters read; () for a tensor that no scatter reads."""
    shapes = {meta.name: meta.shape for meta in manifest}
    read: dict[str, set[Ranges]] = {meta.name: set() for meta in manifest}
    for scatter in scatters:
        read[scatter.tensor].add(scatter.source_rectangle(shapes[scatter.tensor]))
    return {name: merged_rectangles(rectangles) for name, rectangles in read.items()}


class _Recording(Tensor):
    """A tensor without values that stands for known elements of a checkpoint's tensor.

    A recording is a view of a meta tensor, whose offset and strides name the elements. Some functions cannot return a
    view; a recording that such a function returns has the flat index of every element in `flat_index`.
    """

    hf_name: str
    on_copy: Copied
    flat_index: Tensor | None = None

    def steps_in(self, shape: tuple[int, ...]) -> tuple[int, tuple[Tensor, ...]]:
        """The elements as (`source_offset`, `steps`) of a `Scatter`, for a copy into `shape`.

        Raises NotImplementedError for another shape, and for elements in an order that steps cannot describe.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if tuple(self.shape) != shape:
                raise NotImplementedError(
                    f"weights: {self.hf_name}: the loader copies shape {tuple(self.shape)} into another shape {shape}"
                )
            if self.flat_index is None:
                return int(self.storage_offset()), tuple(torch.arange(n) * s for n, s in zip(shape, self.stride()))
            if not shape:
                return int(self.flat_index), ()
            # A scatter has one list of steps for each dimension, so each index must be the sum of one step of each
            # list.
            offset = int(self.flat_index.flatten()[0])
            first: list[Any] = [0] * len(shape)
            steps = []
            sums = torch.full((), offset, dtype=torch.int64)
            for axis in range(len(shape)):
                along = self.flat_index[(*first[:axis], slice(None), *first[axis + 1 :])] - offset
                steps.append(along)
                sums = sums.unsqueeze(-1) + along
            if not torch.equal(sums, self.flat_index):
                raise NotImplementedError(
                    f"weights: {self.hf_name}: the loader reorders elements across dimensions; this is not supported"
                )
            return offset, tuple(steps)

    def flat_indices(self) -> Tensor:
        """Index of every element in the flat checkpoint tensor, in this tensor's shape."""
        if self.flat_index is not None:
            return self.flat_index
        with torch._C.DisableTorchFunctionSubclass():
            flat = torch.arange(self.untyped_storage().nbytes() // self.element_size())
            return flat.as_strided(self.shape, self.stride(), self.storage_offset())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_:
            destination, source = args[:2]
            if not isinstance(source, cls) or isinstance(destination, cls):
                raise NotImplementedError(
                    "weights: the loader may copy only tensors of the checkpoint, and only into parameters"
                )
            source.on_copy(source, destination)
            return destination
        source = next(value for value in _flat_values((args, kwargs.values())) if isinstance(value, cls))
        name = func.__name__
        if name not in _FOLLOWED_FUNCTIONS or "out" in kwargs:
            raise NotImplementedError(
                f"weights: {source.hf_name}: the loader's copies cannot be recorded, since the loader calls {name}, "
                "which may change values"
            )
        if name in _IDENTITIES:
            return source
        # Without this block, each function of a _Recording would call this method again.
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("is_floating_point", "element_size", "__get__"):
                # These functions return facts such as the type, which do not depend on the order of the elements.
                answer = func(*args, **kwargs)
                if not isinstance(answer, Tensor):
                    return answer
            if source.flat_index is None and name not in ("cat", "stack"):
                out = func(*args, **kwargs)
                if not isinstance(out, Tensor | tuple | list) or _are_views(source, out):
                    return _as_recording(source, out)
        return _with_moved_indices(source, func, args, kwargs)


def _flat_values(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple | ValuesView):
            yield from _flat_values(value)
        else:
            yield value


def _tensors(out: Any) -> list[Tensor]:
    return [value for value in _flat_values([out]) if isinstance(value, Tensor)]


def _are_views(source: Tensor, out: Any) -> bool:
    """Whether all tensors in `out` are views of the source; true if there are none."""
    storage = source.untyped_storage()._cdata
    return all(tensor.untyped_storage()._cdata == storage for tensor in _tensors(out))


def _as_recording(source: _Recording, out: Any, index: Any = None) -> Any:
    if isinstance(out, Tensor):
        recording: _Recording = out.as_subclass(_Recording)
        recording.hf_name = source.hf_name
        recording.on_copy = source.on_copy
        recording.flat_index = index
        return recording
    if isinstance(out, tuple | list) and _tensors(out):
        return type(out)(_as_recording(source, tensor, part) for tensor, part in zip(out, index or [None] * len(out)))
    return out


def _with_moved_indices(source: _Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a function that moves elements to the arguments' flat indices, and record where the elements went."""

    def indices(value: Any) -> Any:
        if isinstance(value, _Recording):
            if value.hf_name != source.hf_name:
                raise NotImplementedError(
                    f"weights: {source.hf_name}: the loader may not combine this tensor with {value.hf_name}"
                )
            return value.flat_indices()
        if isinstance(value, list | tuple):
            return type(value)(map(indices, value))
        return value

    out = func(*indices(args), **kwargs)
    if not isinstance(out, Tensor | tuple | list) or not _tensors(out):
        return out
    with torch._C.DisableTorchFunctionSubclass():
        empty = [torch.empty(tensor.shape, dtype=source.dtype, device="meta") for tensor in _tensors(out)]
    if isinstance(out, Tensor):
        return _as_recording(source, empty[0], out)
    return _as_recording(source, type(out)(empty), out)

"""Where the elements of Hugging Face tensors lie in an engine's live parameters, as the model's own loader puts them.

The loader is called once with recording tensors, which have names, shapes and types and no values. What it does to
one of them (cut, chunk, transpose, permute) is followed until it copies it into a parameter: that copy is recorded as
a `Scatter`, and nothing is copied. Afterwards weights are written without the loader, and what an engine needs of
each tensor is known exactly, whatever its parallel layout.

    record      once per model (`record_copies`): load_weights with _Recording tensors -> Scatters, one for each copy
    needs       the rectangles that the scatters read, which the engine names when it connects
    LivePart    made of a scatter by `weights.live_weights`: a view of the parameter, and the tensor's indices in it
    write       in each update: what an arriving rectangle has for the part, in place
    digest      after each update: of what the parameter holds

A _Recording is a view of a meta tensor as long as its storage tells where its elements lie; a function that has to
copy (a reshape after a transposition, cat) makes it an index of all elements, which takes memory for them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import field
from math import prod
from typing import Any

import torch

from megatron_scalerl.record import record
from megatron_scalerl.weights.digest import Along, at, mixed, value_digest
from megatron_scalerl.weights.plan import Manifest, ParamMeta, Ranges, merged

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's load_weights."""
Copied = Callable[["_Recording", torch.Tensor], None]
"""Takes the source and the destination of a copy."""
_SAME = {"contiguous", "to", "cpu", "clone", "detach", "requires_grad_"}
"""Functions that do not change which element lies where."""
_FOLLOWED = {
    *_SAME,
    *("view", "reshape", "flatten", "unflatten", "ravel", "transpose", "swapaxes", "swapdims", "permute", "t", "T"),
    *("movedim", "moveaxis", "narrow", "chunk", "split", "tensor_split", "unbind", "select", "__getitem__"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "view_as", "as_strided"),
    *("index_select", "cat", "stack", "repeat_interleave"),
    *("__get__", "__len__", "size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("is_contiguous", "is_floating_point"),
}
"""Functions that only move elements, or tell a tensor's layout: all that a loader may call."""


@record
class Scatter:
    """One copy of the loader: a part of a tensor, and where it goes.

    Element (i, j, ...) of the copy is element `source_offset` + steps[0][i] + steps[1][j] + ... of the flat tensor.
    """

    tensor: str
    """Name in the Hugging Face checkpoint."""
    parameter: str
    """Name in the engine's model."""
    shape: tuple[int, ...]
    offset: int
    """Of the destination in the parameter's storage, in elements."""
    stride: tuple[int, ...]
    """Of the destination."""
    source_offset: int
    steps: tuple[torch.Tensor, ...] = field(repr=False)
    """[shape[d]] int64 of each dimension."""

    def destination(self, parameter: torch.Tensor) -> torch.Tensor:
        """Its view of the parameter's storage."""
        return parameter.data.as_strided(self.shape, self.stride, self.offset)

    def needed(self, shape: tuple[int, ...]) -> Ranges:
        """The smallest rectangle of the tensor, which has `shape`, that holds all of its elements."""
        low = high = _coordinates(self.source_offset, shape)
        for steps in self.steps:
            ends = [_coordinates(int(end), shape) for end in (steps.min(), steps.max())]
            low = [a + b for a, b in zip(low, ends[0])]
            high = [a + b for a, b in zip(high, ends[1])]
        assert all(b < n for b, n in zip(high, shape)), f"{self.tensor}: steps beyond {shape}"
        return tuple((a, b + 1) for a, b in zip(low, high))


@record
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
        if any(not ranges[axis][0] <= index < ranges[axis][1] for axis, index in self.fixed.items()):
            return
        target, source = self.live, values
        for axis in sorted(self.fixed, reverse=True):
            source = source.select(axis, self.fixed[axis] - ranges[axis][0])
        kept = sorted(self.axes)
        source = source.permute([kept.index(axis) for axis in self.axes])
        scattered = {}
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
            target.index_copy_(place, here.to(target.device), source.to(target))
        else:
            places = [scattered.get(place, torch.arange(size)) for place, size in enumerate(target.shape)]
            mesh = torch.meshgrid(*places, indexing="ij")
            target[tuple(each.to(target.device) for each in mesh)] = source.to(target)

    def digest(self, number: int, dtype: torch.dtype) -> int:
        """Digest of its values as they are now, as `dtype`, the tensor's; number: of the tensor.

        For a parameter that the model holds in a wider type, with values that are not of the tensor's type: a number
        that is the digest of nothing likely.
        """
        values = self.live.to(dtype)
        if values is not self.live and not torch.equal(values.to(self.live.dtype), self.live):
            return mixed(number) | 1
        found = value_digest(values, number, self.axes, self.indices)
        for axis, index in self.fixed.items():
            found *= at(axis, index)
        return found


def record_copies(load: Load, manifest: Manifest, parameters: Mapping[str, torch.Tensor]) -> list[Scatter]:
    """The copies that `load` makes of the manifest's tensors into `parameters`, none of which is made.

    Raises NotImplementedError, naming tensor and function, for what cannot be followed, ValueError for a tensor that
    `load` refuses.
    """
    found = []
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in parameters.items() if tensor.numel()}

    def copied(source: "_Recording", destination: torch.Tensor) -> None:
        parameter = names.get(destination.untyped_storage().data_ptr())
        if parameter is None:
            raise NotImplementedError(
                f"weights: {source.hf_name}: expected a copy into a parameter, found one elsewhere"
            )
        offset, steps = source.steps_in(tuple(destination.shape))
        found.append(
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

    name = "nothing"

    def recordings() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal name
        for meta in manifest:
            name = meta.name
            yield name, _recording(meta, copied)

    try:
        load(recordings())
    except (KeyError, ValueError) as error:
        line = f"{type(error).__name__}: {error}"
        raise ValueError(f"weights: expected tensors of the engine's model, found {name}: {line}") from error
    except NotImplementedError:
        raise
    except (RuntimeError, AttributeError, IndexError, TypeError, AssertionError) as error:
        line = f"{type(error).__name__}: {error}"
        raise NotImplementedError(f"weights: {name}: expected a loader that can be recorded, found {line}") from error
    return found


def missing(scatters: Iterable[Scatter], parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Parameter -> elements that no scatter writes, or, negative, that some write twice; none that are whole."""
    written = dict.fromkeys(parameters, 0)
    for scatter in scatters:
        written[scatter.parameter] += prod(scatter.shape)
    return {name: t.numel() - written[name] for name, t in parameters.items() if t.numel() != written[name]}


def unwritten(
    scatters: Iterable[Scatter], parameters: Mapping[str, torch.Tensor], model: torch.nn.Module
) -> dict[str, str]:
    """Parameter -> what is wrong, for those that are not written once, padding aside."""
    found = {}
    for name, count in missing(scatters, parameters).items():
        prefix, _, key = name.rpartition(".")
        padding = _padding(model.get_submodule(prefix), key, parameters[name])
        if count != padding:
            found[name] = f"{count - padding} missing" if count > padding else f"{padding - count} written twice"
    return found


def _padding(layer: Any, key: str, parameter: torch.Tensor) -> int:
    """Values of a layer's parameter that vLLM pads it with and no checkpoint has."""
    indices = getattr(layer, "shard_indices", None)  # of a vocabulary
    if indices is not None:
        rows = indices.num_elements_padded - indices.num_org_elements - indices.num_added_elements
        return rows * (parameter.numel() // indices.num_elements_padded)
    experts = getattr(getattr(layer, "quant_method", None), "moe", None)
    if experts is not None and key in ("w13_weight", "w2_weight"):
        matrices = 2 if key == "w13_weight" and experts.is_act_and_mul else 1
        each = experts.hidden_dim_unpadded * experts.intermediate_size_per_partition_unpadded
        return parameter.numel() - parameter.shape[0] * matrices * each
    return 0


def needs(scatters: Iterable[Scatter], manifest: Manifest) -> dict[str, tuple[Ranges, ...]]:
    """Tensor -> the rectangles of it that the scatters read, none overlapping another; () if they read nothing."""
    shapes = {meta.name: meta.shape for meta in manifest}
    found: dict[str, set[Ranges]] = {meta.name: set() for meta in manifest}
    for scatter in scatters:
        found[scatter.tensor].add(scatter.needed(shapes[scatter.tensor]))
    return {name: merged(rectangles) for name, rectangles in found.items()}


def _coordinates(flat: int, shape: tuple[int, ...]) -> list[int]:
    found = []
    for size in reversed(shape):
        flat, last = divmod(flat, size)
        found.append(last)
    return found[::-1]


class _Recording(torch.Tensor):
    """A tensor without values that knows which elements of a named one it holds.

    It is a view of a meta tensor, whose offset and strides tell; after a function that cannot be a view,
    `flat_index` has the flat index of every element.
    """

    hf_name: str
    on_copy: Copied
    flat_index: torch.Tensor | None

    def steps_in(self, shape: tuple[int, ...]) -> tuple[int, tuple[torch.Tensor, ...]]:
        """(offset, steps of each dimension) of its elements, read in `shape`. Raises NotImplementedError."""
        with torch._C.DisableTorchFunctionSubclass():
            if tuple(self.shape) != shape:
                raise NotImplementedError(
                    f"weights: {self.hf_name}: expected a copy of shape {tuple(self.shape)}, found {shape}"
                )
            if self.flat_index is None:
                strides = self.stride()
                steps = tuple(torch.arange(n) * s for n, s in zip(shape, strides))
                return int(self.storage_offset()), steps
            if not shape:
                return int(self.flat_index), ()
            offset = int(self.flat_index.flatten()[0])
            first: list[Any] = [0] * len(shape)
            found, total = [], torch.full((), offset, dtype=torch.int64)
            for axis in range(len(shape)):
                along = self.flat_index[(*first[:axis], slice(None), *first[axis + 1 :])] - offset
                found.append(along)
                total = total + along.view([-1 if d == axis else 1 for d in range(len(shape))])
            if not torch.equal(total, self.flat_index):
                raise NotImplementedError(f"weights: {self.hf_name}: expected independent orders of its dimensions")
            return offset, tuple(found)

    def flat_indices(self) -> torch.Tensor:
        """Flat index of every element."""
        if self.flat_index is not None:
            return self.flat_index
        with torch._C.DisableTorchFunctionSubclass():
            flat = torch.arange(self.untyped_storage().nbytes() // self.element_size())
            return flat.as_strided(self.shape, self.stride(), self.storage_offset())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_:
            destination, source = args[:2]
            if not isinstance(source, cls) or isinstance(destination, cls):
                raise NotImplementedError("weights: expected copies of recorded tensors into parameters alone")
            source.on_copy(source, destination)
            return destination
        source = next(each for each in _flat((args, kwargs.values())) if isinstance(each, cls))
        name = func.__name__
        if name not in _FOLLOWED or "out" in kwargs:
            raise NotImplementedError(f"weights: {source.hf_name}: expected a view of it, found {name}")
        if name in _SAME:
            return source
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("is_floating_point", "element_size", "__get__"):  # of the tensor, not of its indices
                answer = func(*args, **kwargs)
                if not isinstance(answer, torch.Tensor):
                    return answer
            if source.flat_index is None and name not in ("cat", "stack"):
                out = func(*args, **kwargs)
                if not isinstance(out, torch.Tensor | tuple | list) or _shares(source, out):
                    return _wrapped(source, out)
        return _moved(source, func, args, kwargs)


def _recording(meta: ParamMeta, copied: Copied) -> _Recording:
    empty = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
    made: _Recording = empty.as_subclass(_Recording)
    made.hf_name, made.on_copy, made.flat_index = meta.name, copied, None
    return made


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple | ValuesView):
            yield from _flat(value)
        else:
            yield value


def _tensors(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else [each for each in out if isinstance(each, torch.Tensor)]


def _shares(source: torch.Tensor, out: Any) -> bool:
    """Whether all tensors in `out` are views of the source, or there are none."""
    own = source.untyped_storage()._cdata
    return all(each.untyped_storage()._cdata == own for each in _tensors(out))


def _wrapped(source: _Recording, out: Any, index: Any = None) -> Any:
    if isinstance(out, torch.Tensor):
        made: _Recording = out.as_subclass(_Recording)
        made.hf_name, made.on_copy, made.flat_index = source.hf_name, source.on_copy, index
        return made
    if isinstance(out, tuple | list) and _tensors(out):
        parts = [None] * len(out) if index is None else index
        return type(out)(_wrapped(source, each, part) for each, part in zip(out, parts))
    return out


def _moved(source: _Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a function that moves elements to the indices of its arguments."""

    def indices(value: Any) -> Any:
        if isinstance(value, _Recording):
            if value.hf_name != source.hf_name:
                raise NotImplementedError(
                    f"weights: {source.hf_name}: expected one tensor, found {value.hf_name} beside it"
                )
            return value.flat_indices()
        if isinstance(value, list | tuple):
            return type(value)(indices(each) for each in value)
        return value

    out = func(*indices(args), **kwargs)
    if not isinstance(out, torch.Tensor | tuple | list) or not _tensors(out):
        return out
    with torch._C.DisableTorchFunctionSubclass():
        empty = [torch.empty(each.shape, dtype=source.dtype, device="meta") for each in _tensors(out)]
    return _wrapped(source, empty[0] if isinstance(out, torch.Tensor) else type(out)(empty), out)

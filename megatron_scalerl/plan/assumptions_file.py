"""A YAML file of measured constants that replace the planner's defaults: `plan --assumptions FILE`.

    gpu: NVIDIA H100 80GB HBM3        # its name in CUDA, or the planner's --gpu; constants apply to one GPU
    layers: plain                     # optional: layers of the measured trainer, see --layers
    written: 2026-11-21
    assumptions:
      dense_utilization:              # a field of `Assumptions`
        value: 0.37
        source: "measured: 8B shape, 4 layers, 16,384 tokens"   # optional

`pytest -m gpu tests/gpu` and tools/bench_shapes.py write one (docs/gpu.md).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.plan.assumptions import OLD_NAMES, check_number, described
from megatron_scalerl.plan.hardware import GPUS, Layers, gpu_of_device
from megatron_scalerl.recipe.other_names import check_keys

_HEADER = ("gpu", "layers", "written", "assumptions")
_ENTRY = ("value", "source")
_LISTED = "megatron-scalerl plan --help"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One constant."""

    value: float
    """In the unit of the field of `Assumptions`."""
    source: str | None = None
    """How it was measured; one line."""


@dataclass(frozen=True, kw_only=True)
class AssumptionsFile:
    """The contents of a file. Produced by `read_assumptions`."""

    path: Path
    gpu: str
    """A key of `hardware.GPUS`."""
    gpu_named: str
    """The name in the file."""
    layers: Layers | None
    """None: valid for both."""
    written: str
    """Date, or an empty string."""
    values: Mapping[str, Measured]
    """By field of `Assumptions`."""

    def source(self, name: str) -> str:
        """One line: file, date, and how the value was measured."""
        when = f" of {self.written}" if self.written else ""
        how = self.values[name].source
        return f"{self.path}{when}" + (f": {how}" if how else "")


def write_assumptions(
    path: str | Path, values: Mapping[str, Measured], *, gpu: str, layers: Layers | None = None
) -> None:
    """Write the file atomically, dated today (UTC); `gpu` is the name in CUDA.

    Raises ValueError for an unknown field, a number out of range and without values, OSError if the file cannot be
    written. Any `gpu` is written; a plan accepts those in `hardware.GPUS`.
    """
    path = Path(path)
    if not values:
        raise ValueError(f"{path}: expected at least one measured constant, found none")
    rows: dict[str, Any] = {}
    _check_keys(path, "assumptions.", values, _names())
    for name, measured in values.items():
        rows[name] = {"value": _number(path, name, measured.value)}
        if measured.source:
            rows[name]["source"] = " ".join(measured.source.split())
    today = datetime.datetime.now(datetime.UTC).date()
    header = {"gpu": gpu} | ({"layers": layers} if layers else {}) | {"written": today}
    text = yaml.safe_dump(header | {"assumptions": rows}, sort_keys=False, allow_unicode=True, width=1000)
    write_durably(path, ("# Measured constants: megatron-scalerl plan --assumptions FILE\n" + text).encode())


def read_assumptions(path: str | Path) -> AssumptionsFile:
    """The file's constants. Raises ValueError, in one line with file and key, for invalid contents."""
    path = Path(path)
    data = _mapping(path, "", _loaded(path), _HEADER)
    named = _text(path, "gpu", data.get("gpu"))
    key = gpu_of_device(named)
    if key is None:
        raise ValueError(
            f"{path}: gpu: expected a GPU that the planner supports ({', '.join(sorted(GPUS))}), found {named!r}"
        )
    layers = data.get("layers")
    if layers is not None and layers not in get_args(Layers):
        raise ValueError(f"{path}: layers: expected {' or '.join(get_args(Layers))}, found {layers!r}")
    written = data.get("written")
    if not isinstance(written, datetime.date | str | None):
        raise ValueError(f"{path}: written: expected a date, found {written!r}")
    rows = _mapping(path, "assumptions.", data.get("assumptions"), _names())
    return AssumptionsFile(
        path=path,
        gpu=key,
        gpu_named=named,
        layers=layers,
        written=str(written or ""),
        values={name: _measured(path, name, row) for name, row in rows.items()},
    )


def _measured(path: Path, name: str, row: object) -> Measured:
    found = _mapping(path, f"assumptions.{name}.", row, _ENTRY)
    if "value" not in found:
        raise ValueError(f"{path}: assumptions.{name}.value: expected a number, found none")
    source = found.get("source")
    if source is not None:
        source = " ".join(_text(path, f"assumptions.{name}.source", source).split())
    return Measured(value=_number(path, name, found["value"]), source=source)


def _number(path: Path, name: str, value: object) -> float:
    try:
        return check_number(name, value)
    except ValueError as error:
        raise ValueError(f"{path}: assumptions.{name}.value: {error}") from None


def _text(path: Path, key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{path}: {key}: expected text, found {'nothing' if value is None else repr(value)}")
    return value.strip()


def _names() -> list[str]:
    return [f.name for f in described()]


def _mapping(path: Path, prefix: str, value: object, keys: Iterable[str]) -> dict[str, Any]:
    """`value`, checked to be a nonempty mapping with no other keys."""
    if not isinstance(value, dict) or not value:
        where = f"{prefix[:-1]}: " if prefix else ""
        found = "nothing" if not value else f"{type(value).__name__} {str(value)[:60]!r}"
        raise ValueError(f"{path}: {where}expected a mapping with {_some(keys)}, found {found}")
    _check_keys(path, prefix, value, keys)
    return value


def _some(keys: Iterable[str]) -> str:
    names = list(keys)
    return ", ".join(names) if len(names) <= len(_HEADER) else f"{names[0]} and other assumptions"


def _check_keys(path: Path, prefix: str, given: Iterable[object], known: Iterable[str]) -> None:
    names, expected = [prefix + name for name in known], "a key of an assumptions file"
    for key in given:
        if key in OLD_NAMES and OLD_NAMES[key] in known:
            raise ValueError(
                f"{path}: expected {expected}, found {prefix}{key}; it was renamed to {prefix}{OLD_NAMES[key]}"
            )
    check_keys(str(path), (f"{prefix}{key}" for key in given), names, expected=expected, listed=_LISTED)


class _Loader(yaml.SafeLoader):
    """Rejects repeated keys, of which PyYAML would silently keep the last."""


def _mapping_once(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        name = str(key.value)
        if name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {name} twice", key.start_mark)
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_once)


def _loaded(path: Path) -> object:
    if not path.is_file():
        raise ValueError(f"{path}: expected an assumptions file, found {'a folder' if path.is_dir() else 'nothing'}")
    try:
        return yaml.load(path.read_text(encoding="utf8"), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file, found {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{path}: {where}expected YAML, found {problem}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8, found {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError(f"{path}: expected assumptions, found lists or mappings nested too deep") from None
    except ValueError as error:  # a date in month 13, a number of thousands of digits
        raise ValueError(f"{path}: invalid YAML value: {str(error).partition(';')[0]}") from None

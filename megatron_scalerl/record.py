"""The decorator of the classes that are passed on."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make the class a frozen dataclass with slots, whose fields are given by name.

    So no receiver changes what a sender still reads, and no field is given in another's place.

    Example:
        >>> @record
        ... class Place:
        ...     host: str
        ...     port: int = 0
        >>> Place(host="a")
        Place(host='a', port=0)
    """
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)

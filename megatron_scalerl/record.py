"""The decorator of the data classes that are passed between parts of the program."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make the class a frozen dataclass with slots and keyword-only fields.

    A receiver then cannot change an object that the sender still reads, and a caller cannot swap two fields.

    Example:
        >>> @record
        ... class Address:
        ...     host: str
        ...     port: int = 0
        >>> Address(host="a")
        Address(host='a', port=0)
    """
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)

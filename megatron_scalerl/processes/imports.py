"""Imports objects that a recipe names as `module:name`: a verifier, an environment, a loss, an algorithm."""

import importlib
from typing import Any


def imported(head: str, spec: str, forms: str) -> Any:
    """The object that `spec`, `module:name`, names. head: the beginning of each message. forms: accepted forms.

    Raises ValueError, in one line, for another form, and if the import fails.
    """
    module_name, separator, name = spec.partition(":")
    if not (module_name and separator and name):
        raise ValueError(f"{head}: it has to be {forms}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # A user's module may raise any exception on import.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{head}: the module cannot be imported: {reason}") from None
    if not hasattr(module, name):
        raise ValueError(f"{head}: {module_name} has no {name}")
    return getattr(module, name)

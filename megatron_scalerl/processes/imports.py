"""Imports objects that a recipe names as `module:name`: a verifier, an environment, a loss, an algorithm."""

import importlib
from typing import Any


def imported(head: str, spec: str, forms: str) -> Any:
    """Import the object that `spec` names as `module:name`.

    head: beginning of each error message. forms: description of valid values, for the message about an invalid
    `spec`. Raises ValueError, with a message of one line, if `spec` is invalid, the import fails or the object is
    missing.
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

"""Writes a row's reference as answers in different forms. A verifier that works rewards at least one of the forms."""

from collections.abc import Mapping
from typing import Any


def forms_of(reference: str, columns: Mapping[str, Any]) -> list[str]:
    r"""The answers to try: the reference bare, in a box and in answer tags; and the row's solution, if any.

    Example:
        >>> forms_of("7", {"solution": "3 + 4 = 7"})
        ['7', '\\boxed{7}', '<answer>7</answer>', '3 + 4 = 7']
    """
    forms = [reference, f"\\boxed{{{reference}}}", f"<answer>{reference}</answer>"]
    solution = columns.get("solution")
    if isinstance(solution, str):
        forms.append(solution)
    return list(dict.fromkeys(forms))

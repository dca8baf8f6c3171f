"""Answers that give a row's reference in different forms; a working verifier rewards at least one answer."""

from collections.abc import Mapping
from typing import Any


def forms_of(reference: str, columns: Mapping[str, Any]) -> list[str]:
    r"""The reference as answers: bare, in a box and in answer tags; and the row's solution, if any.

    Example:
        >>> forms_of("7", {"solution": "3 + 4 = 7"})
        ['7', '\\boxed{7}', '<answer>7</answer>', '3 + 4 = 7']
    """
    forms = [reference, f"\\boxed{{{reference}}}", f"<answer>{reference}</answer>"]
    solution = columns.get("solution")
    if isinstance(solution, str):
        forms.append(solution)
    return list(dict.fromkeys(forms))

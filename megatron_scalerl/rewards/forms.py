"""Forms of a row's reference, one of which a working verifier gives a reward."""

from collections.abc import Mapping
from typing import Any


def forms_of(reference: str, columns: Mapping[str, Any]) -> list[str]:
    r"""The reference itself, in a box and in answer tags, and the row's solution if the row has one.

    Example:
        >>> forms_of("7", {"solution": "3 + 4 = 7"})
        ['7', '\\boxed{7}', '<answer>7</answer>', '3 + 4 = 7']
    """
    forms = [reference, f"\\boxed{{{reference}}}", f"<answer>{reference}</answer>"]
    solution = columns.get("solution")
    if isinstance(solution, str):
        forms.append(solution)
    return list(dict.fromkeys(forms))

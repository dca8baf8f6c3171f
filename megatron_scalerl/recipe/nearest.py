"""Error messages for unknown keys, which name the key that was meant, or those that there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

from megatron_scalerl.recipe.other_names import setting_of

_NEAR_BESIDE, _NEAR_ELSEWHERE, _FAR_BESIDE = 0.8, 0.9, 0.65
"""Least likeness of a name to be suggested: in the same section, in another one, where only a name that is nearly the
same was meant, and in the same section if there is none of these."""
_MOST_LISTED = 12
_MOST_NEAREST = 3


def check_keys(
    where: str,
    given: Iterable[object],
    known: Iterable[str],
    *,
    expected: str,
    in_recipe: bool = False,
    listed: str = "",
) -> None:
    """Raise ValueError for the first of the `given` keys that is not `known`; arguments as for `unknown_key`.

    in_recipe: `where` is a section of the recipe, whose keys have other names in other frameworks.
    """
    names = list(known)
    for key in given:
        if key not in names:
            setting = setting_of(f"{where}.{key}") if in_recipe else None
            text = unknown_key(str(key), names, expected=expected, setting=setting, listed=listed)
            raise ValueError(f"{where}: {text}")


def unknown_key(
    key: str,
    known: Iterable[str],
    *,
    expected: str,
    setting: str | None = None,
    kind: str = "keys",
    listed: str = "",
) -> str:
    """`expected ..., found KEY; the nearest is ...`, and without a near one `...; keys here: a, b, c`.

    Dotted keys are compared with those of their own section, then by their last part with all others. expected: what
    `known` holds, as in "a recipe key"; kind: the same in one word. setting: what KEY is called here, if that is
    known (`setting_of`). listed: where the keys are listed that are too many for a line.
    """
    text = f"expected {expected}, found {key}"
    if setting is not None:
        return f"{text}; it is set by {setting}"
    names = list(known)
    section, last = key.rpartition(".")[::2]
    beside = [name for name in names if name.rpartition(".")[0] == section]
    others = [name for name in names if ".NAME." not in name]
    for among, least in ((beside, _NEAR_BESIDE), (others, _NEAR_ELSEWHERE), (beside, _FAR_BESIDE)):
        if nearest := _nearest(last, among, least):
            return f"{text}; the nearest is {' or '.join(nearest)}"
    if 0 < len(beside) <= _MOST_LISTED:
        return f"{text}; {kind} here: {', '.join(name.rpartition('.')[2] for name in beside)}"
    return f"{text}; all {kind}: {listed}" if listed else text


def _nearest(last: str, names: Collection[str], least: float) -> list[str]:
    """Those most like `last`, if they are at least so much like it and no more than a few."""
    alike = {name: _likeness(last, name.rpartition(".")[2]) for name in names}
    best = max(alike.values(), default=0.0)
    found = [name for name in names if alike[name] == best]
    return found if best >= least and len(found) <= _MOST_NEAREST else []


def _likeness(given: str, name: str) -> float:
    """From 0 to 1, at least 0.7 for a `name` with all words of `given`, as warmup_steps has those of warmup."""
    within = len(given) > 3 and set(given.split("_")) <= set(name.split("_"))
    return max(SequenceMatcher(None, given, name).ratio(), 0.7 if within else 0.0)

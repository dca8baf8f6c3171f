"""The field's names of columns: one ranked table of scores, one of computes with their units, and the nearest names.

The names are those of verl, TRL, OpenRLHF, SkyRL, tinker-cookbook, prime-rl, W&B and TensorBoard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any

STAGES = (
    r"val|valid|validation|eval|evaluation|test|dev|heldout|held out",
    r"",
    r"train|training|trainer|critic|actor|rollouts?|policy",
)
"""Words of a validation, of neither and of training, in order of preference. Words of a name are set apart by one
space here and below: `val-core/math/acc/mean@16` is "val core math acc mean@16"."""
SCORES = (
    r"pass ?rate",
    r"acc|accuracy|accuracies|correct|correctness|exact match|em",
    r"(?:mean|avg|acc|pass)@\d+",
    r"success|success rate|solve rate|solved|win rate",
    r"scores?",
    r"(?:pass|maj|best|cons)@\d+",
    r"rewards?|returns?",
    r"value",
)
"""Words of a score, in order of preference within a stage."""
_BEST_OF = re.compile(r"\b(?:best|maj|cons|pass)@(?!1\b)")
_NO_SCORE = re.compile(
    r"\b(?:std|stderr|var|variance|min|max|loss|len|length|tokens?|time|seconds?|runtime|count|num|n|entropy|kl|lr|grad"
    r"|norm|clip|format|pars\w+|json|xml|tool|advantages?|best(?!@)|worst|truncat\w+|weight|index|size|penalty|zero"
    r"|threshold|target|id|gap|diff|delta|ratio|bonus|err|errors?|wer|cer|fail\w*|incorrect\w*|wrong\w*|lose|lost"
    r"|lengths|losses|hack\w*|hallucinat\w*|invalid|timeouts?|baseline|ppl|perplexity|mfu)\b"
)
_WHOLE = {"all", "total", "overall", "average"}
_AT = r"(?:(?:train|training|trainer|eval|val|progress)[/_])?"
COMPUTES: tuple[tuple[str, str | None], ...] = (
    (r"(?:.*[^a-z])?gpu[-_ ]?(?:hours?|h)(?:[^a-z].*)?", "gpu_hours"),
    (r"device[-_ ]?hours?", "device_hours"),
    (r"compute|hours|flops", None),
    (_AT + r"(?:global|opt\w*|grad\w*|grpo|ppo|rl|policy|train|training|update|env|time)[-_ ]?steps?", "steps"),
    (_AT + r"steps?", "steps"),
    (r"_step", "steps"),
    (r"(?:checkpoint|ckpt)(?:_step)?", "steps"),
    (_AT + r"(?:batch|iteration|iter|update|round|episode)s?", None),
    (_AT + r"(?:(?:total|cumulative|num|input)_)*(?:tokens|samples)(?:_seen)?", None),
    (_AT + r"epochs?", None),
    (r"_?runtime|relative time.*|elapsed(?![-_ ]?(?:m|h|d)).*|(?:train_|wall_(?:time_)?)?seconds", "seconds"),
    (r".*[-_ ]hours?", None),
)
"""(pattern of the whole name in lower case, unit) of a compute column, in order of preference; None: its own name."""
_DAYTIME = re.compile(r"(?:wall[-_ ]?time|_?timestamp|(?:date)?time|date|created[-_ ]?at)", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[T ].*)?")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_STEP_NAME = re.compile(r"(?:.*[-_/ ])?(?:checkpoint|ckpt|step|iter|iteration|epoch)[-_ ]?(\d+)/?", re.IGNORECASE)
"""The name of a checkpoint: checkpoint-100, runs/a/global_step_100, step_000100."""


def words(name: str) -> str:
    """The words of a column's name in lower case, set apart by one space; pass_at_1 and pass1 are pass@1."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    said = re.sub(r"[^a-z0-9@]+", " ", apart.lower()).strip()
    return re.sub(r"\b(?:(pass|avg|mean|maj|best|acc) at |(pass) ?)(\d+)\b", r"\1\2@\3", said)


def stage(name: str) -> int:
    """0 for a validation, 2 for training, 1 for what says neither."""
    said = words(name)
    return next((n for n in (0, 2) if re.search(rf"\b(?:{STAGES[n]})\b", said)), 1)


def may_be_score(name: str) -> bool:
    """False for losses, lengths, spreads and the like."""
    return _NO_SCORE.search(words(name)) is None


def score_rank(name: str) -> tuple[int, ...] | None:
    """The lower, the rather it is the score; None if it is none.

    (stage, 0 for verl's core metrics, measure, 0 for the whole of several parts, words of the name)
    """
    said = words(name)
    if not may_be_score(name):
        return None
    found = [n for n, pattern in enumerate(SCORES) if re.search(rf"\b(?:{pattern})\b", said)]
    if not found or (found[0] == len(SCORES) - 1 and said != "value"):
        return None
    measure = 5 if _BEST_OF.search(said) else found[0]
    parts = said.split()
    return stage(name), int("core" not in parts), measure, int(not _WHOLE & {*parts}), len(parts)


def scores(names: Iterable[str]) -> list[str]:
    """The names that are scores, best first; among equals in the given order."""
    ranked = [(rank, name) for name in names if (rank := score_rank(name)) is not None]
    return [name for _, name in sorted(ranked, key=lambda each: each[0])]


def unit_of(column: str) -> str:
    """Unit of a compute column: "steps", "seconds", "gpu_hours", "device_hours", else the column's own name."""
    found = next((unit for pattern, unit in COMPUTES if re.fullmatch(pattern, column.lower())), None)
    return found or column


def computes(names: Sequence[str]) -> list[str]:
    """The names that are computes, best first."""
    return [name for pattern, _ in COMPUTES for name in names if re.fullmatch(pattern, name.lower())]


def number(cell: Any) -> float:
    """The number in a cell: 12, "0.3", "12%", "1,200", "checkpoint-100". Raises ValueError, TypeError for others."""
    text = cell.strip().removesuffix("%") if isinstance(cell, str) else cell
    if isinstance(text, str) and _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return float(named[1] if isinstance(text, str) and (named := _STEP_NAME.fullmatch(text)) else text)


def is_step_name(cell: Any) -> bool:
    """Whether it names a checkpoint by its step."""
    return _STEP_NAME.fullmatch(str(cell).strip()) is not None


def is_time_of_day(name: str, value: Any) -> bool:
    """Whether it is a date, as text or in seconds, not the time since a run's start."""
    if isinstance(value, str):
        return _DATE.fullmatch(value.strip()) is not None
    return value > 1e9 and _DAYTIME.fullmatch(name) is not None


def is_reward(name: str) -> bool:
    """Whether nothing says that its values lie in [0, 1]: a reward may be any number."""
    said = words(name).split()
    return score_rank(name) is None or any(re.fullmatch("(?:score|reward|return|value)s?", word) for word in said)


def some_of(names: Sequence[str], wanted: Sequence[str]) -> str:
    """All names if they are few, else their number and the three nearest to the wanted ones."""
    names = [name for name in names if name]
    if len(names) <= 6:
        return ", ".join(names) or "none"

    def nearness(name: str) -> float:
        parts = [words(name), *words(name).split()]
        return max(SequenceMatcher(None, part, words(want)).ratio() for part in parts for want in wanted)

    nearest = sorted(names, key=nearness, reverse=True)[:3]
    return f"{len(names)} columns, the nearest: {', '.join(nearest)}"

"""The runs below a folder, and what else lies directly in it."""

import os
from collections import deque
from pathlib import Path

from megatron_scalerl.processes.logs import listed
from megatron_scalerl.recipe.file import read_run_recipe
from megatron_scalerl.record import record

MARKS = frozenset(
    {"recipe.yaml", "validation.jsonl", "metrics.jsonl", "ledger.jsonl", "attempts.jsonl", "journal.jsonl"}
)
"""Files of which a run's folder has one at least, from its first seconds on."""
DEPTH = 4
"""Levels of folders below the given one that are searched; a study has its runs in the third."""
MOST_RUNS = 200
MOST_FOLDERS = 5000
"""Folders that are looked into."""


@record
class FoundRuns:
    """What a folder holds."""

    runs: tuple[Path, ...]
    """Folders with a file of `MARKS`, by path; at most `MOST_RUNS`."""
    others: tuple[tuple[Path, str], ...]
    """Folders directly in it without a run in them, and what was found there, in one line."""
    left_out: str
    """What was not looked at, in one line; empty if nothing."""


def is_run(folder: Path) -> bool:
    """Whether the folder is a run itself; otherwise there is a run below it.

    Raises ValueError for a folder that is neither and for a run whose recipe cannot be read, OSError.
    """
    if folder.is_dir() and not (folder / "recipe.yaml").exists():
        if find_runs(folder).runs:
            return False
        raise ValueError(f"{folder}: it is no run (recipe.yaml), and no run is below it")
    read_run_recipe(folder)
    return True


def find_runs(folder: Path) -> FoundRuns:
    """Search a folder, breadth first; nothing inside a run is searched, hidden folders neither.

    Raises OSError if the folder itself cannot be read.
    """
    waiting = deque([(folder, 0, "")])
    seen = set()
    runs: list[Path] = []
    found: dict[str, str] = {}
    """By name of the folder in `folder`: what it holds; empty once a run is found in it."""
    looked = 0
    left_out = ""
    while waiting:
        path, depth, top = waiting.popleft()
        if looked == MOST_FOLDERS or len(runs) == MOST_RUNS:
            left_out = f"only the first {looked:,} folders and {len(runs)} runs are shown"
            break
        looked += 1
        try:
            identity = os.stat(path)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            if depth == 0:
                raise
            found.setdefault(top, f"the folder cannot be read: {error.strerror}")
            continue
        if (key := (identity.st_dev, identity.st_ino)) in seen:
            continue
        seen.add(key)
        if depth and MARKS & {entry.name for entry in entries}:
            runs.append(path)
            found[top] = ""
            continue
        if depth == 1:
            found.setdefault(top, _described([entry.name for entry in entries]))
        if depth < DEPTH:
            for entry in entries:
                if not entry.name.startswith(".") and _is_folder(entry):
                    waiting.append((path / entry.name, depth + 1, top or entry.name))
    others = tuple((folder / name, text) for name, text in sorted(found.items()) if text)
    return FoundRuns(runs=tuple(sorted(runs)), others=others, left_out=left_out)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _described(names: list[str]) -> str:
    return f"it is no run (recipe.yaml) and holds {listed(names, 4) or 'nothing'}"

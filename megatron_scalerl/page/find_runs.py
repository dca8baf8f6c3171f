"""Finds the runs below a folder, and describes the other folders in it."""

import os
from collections import deque
from pathlib import Path

from megatron_scalerl.processes.logs import listed
from megatron_scalerl.recipe.file import read_run_recipe
from megatron_scalerl.record import record

MARKS = frozenset(
    {"recipe.yaml", "validation.jsonl", "metrics.jsonl", "ledger.jsonl", "attempts.jsonl", "journal.jsonl"}
)
"""Files of a run. Its folder has at least one of them, from its first seconds on."""
DEPTH = 4
"""Levels of folders that are searched below the given folder; a study has its runs in the third."""
MOST_RUNS = 200
MOST_FOLDERS = 5000
"""Most folders that are searched."""


@record
class FoundRuns:
    """The runs of a folder, and its other folders."""

    runs: tuple[Path, ...]
    """Folders with a file of `MARKS`, by path; at most `MOST_RUNS`."""
    others: tuple[tuple[Path, str], ...]
    """(folder directly in it that has no run, a line about its content)."""
    left_out: str
    """A line about the part that was not searched; empty if all was."""


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
    """(folder, its depth, name of the folder in `folder` that it is below)."""
    identities = set()
    runs: list[Path] = []
    contents: dict[str, str] = {}
    """Name of a folder in `folder` -> its content in one line; empty once a run is found in it."""
    left_out = ""
    searched = 0
    while waiting:
        path, depth, top = waiting.popleft()
        if searched == MOST_FOLDERS or len(runs) == MOST_RUNS:
            left_out = f"only the first {searched:,} folders and {len(runs)} runs are shown"
            break
        searched += 1
        try:
            status = os.stat(path)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            if depth == 0:
                raise
            # setdefault: `top` keeps its empty line where a run was found below it before
            contents.setdefault(top, f"the folder cannot be read: {error.strerror}")
            continue
        identity = (status.st_dev, status.st_ino)
        if identity in identities:  # a symbolic link may lead back up
            continue
        identities.add(identity)
        names = [entry.name for entry in entries]
        if depth and not MARKS.isdisjoint(names):
            runs.append(path)
            contents[top] = ""
            continue
        if depth == 1:
            contents.setdefault(top, f"it is no run (recipe.yaml) and holds {listed(names, 4) or 'nothing'}")
        if depth < DEPTH:
            for entry in entries:
                if not entry.name.startswith(".") and _is_folder(entry):
                    waiting.append((path / entry.name, depth + 1, top or entry.name))
    others = tuple((folder / name, text) for name, text in sorted(contents.items()) if text)
    return FoundRuns(runs=tuple(sorted(runs)), others=others, left_out=left_out)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False

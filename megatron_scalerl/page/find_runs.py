"""Finds the runs below a folder."""

import os
from collections import deque
from pathlib import Path

from megatron_scalerl.processes.logs import listed, printable
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
    """The runs below a folder."""

    runs: tuple[Path, ...]
    """Folders with a file of `MARKS`, by path; at most `MOST_RUNS`."""
    left_out: str
    """A line about folders that were not searched; empty if all were."""


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
    waiting = deque([(folder, 0)])
    """(folder, its depth)."""
    identities = set()
    runs: list[Path] = []
    left_out: list[str] = []
    searched = 0
    while waiting:
        path, depth = waiting.popleft()
        if searched == MOST_FOLDERS or len(runs) == MOST_RUNS:
            left_out.append(f"only the first {searched:,} folders and {len(runs)} runs are shown")
            break
        searched += 1
        try:
            status = os.stat(path)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            if depth == 0:
                raise
            left_out.append(f"{printable(str(path.relative_to(folder)))} cannot be read: {error.strerror}")
            continue
        identity = (status.st_dev, status.st_ino)
        if identity in identities:  # a symbolic link may lead back up
            continue
        identities.add(identity)
        if depth and not MARKS.isdisjoint(entry.name for entry in entries):
            runs.append(path)
            continue
        if depth < DEPTH:
            for entry in entries:
                if not entry.name.startswith(".") and _is_folder(entry):
                    waiting.append((path / entry.name, depth + 1))
    return FoundRuns(runs=tuple(sorted(runs)), left_out=listed(left_out, 4))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False

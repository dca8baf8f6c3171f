"""Finds the runs below a folder."""

import os
from pathlib import Path

from megatron_scalerl.processes.logs import listed, printable
from megatron_scalerl.recipe.file import read_run_recipe
from megatron_scalerl.record import record

MARKS = frozenset(
    {"recipe.yaml", "validation.jsonl", "metrics.jsonl", "ledger.jsonl", "attempts.jsonl", "journal.jsonl"}
)
"""File names that mark the folder of a run: from a run's first seconds on, the folder has at least one such file."""
DEPTH = 4
"""Levels of folders that `find_runs` searches below the given folder; a study has runs at the third level."""


@record
class FoundRuns:
    """The runs below a folder."""

    runs: tuple[Path, ...]
    """Folders with a file of `MARKS`, sorted by path."""
    left_out: str
    """A line about unreadable folders; empty if every folder is readable."""


def is_run(folder: Path) -> bool:
    """True for the folder of a run, False for a folder with runs below.

    Raises ValueError for any other folder and for a run with an invalid recipe, OSError for an unreadable file.
    """
    if folder.is_dir() and not (folder / "recipe.yaml").exists():
        if find_runs(folder).runs:
            return False
        raise ValueError(f"{folder}: neither this folder (no recipe.yaml) nor a subfolder is a run; name a run")
    read_run_recipe(folder)
    return True


def find_runs(folder: Path) -> FoundRuns:
    """Find the runs below a folder. The search skips hidden folders, and does not look for runs inside a run.

    Raises OSError if `folder` cannot be read.
    """
    left_out = []

    def skip(error: OSError) -> None:
        path = Path(error.filename)
        if path == folder:
            raise error
        left_out.append(f"{printable(str(path.relative_to(folder)))} cannot be read: {error.strerror}")

    runs = []
    places = set()
    for name, folders, files in os.walk(folder, onerror=skip, followlinks=True):
        path = Path(name)
        depth = len(path.relative_to(folder).parts)
        place = path.resolve()
        is_run = depth > 0 and not MARKS.isdisjoint(files)
        if is_run and place not in places:
            runs.append(path)
        if is_run or depth == DEPTH or place in places:  # a place seen before: a link leads back
            folders.clear()
        places.add(place)
        folders[:] = sorted(child for child in folders if not child.startswith("."))
    return FoundRuns(runs=tuple(sorted(runs)), left_out=listed(left_out, 4))

"""Which checkpoint folders count: the COMMIT file, its check, the newest one, and the pruning of old ones.

A checkpoint is a folder `step_000123` whose COMMIT file, written last and by rename, lists every other file with
its size. A folder without it was interrupted while being written and is no checkpoint. Imports no torch: the
controller reads checkpoints' names too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_scalerl.durable import sync_folder, write_durably

COMMIT = "COMMIT"
_STEP = re.compile(r"step_(\d+)")


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of `step` lies under `folder`."""
    return Path(folder) / f"step_{step:06d}"


def write_commit(path: str | Path, facts: Mapping[str, Any]) -> None:
    """Commit the folder `path` as it is: list its files with their sizes, and `facts`, in COMMIT."""
    path = Path(path)
    files = {str(f.relative_to(path)): f.stat().st_size for f in sorted(path.rglob("*")) if f.is_file()}
    files.pop(COMMIT, None)
    write_durably(path / COMMIT, json.dumps({**facts, "files": files}, indent=1).encode())
    sync_folder(path)
    sync_folder(path.parent)


def read_commit(path: str | Path) -> dict[str, Any]:
    """The facts of a committed checkpoint, after checking that every file of it is there in full.

    Raises ValueError, naming the file, for a folder that is missing or not committed and for a file that is
    missing or has another size.
    """
    path = Path(path)
    commit = path / COMMIT
    if not commit.is_file():
        found = "a folder without it" if path.is_dir() else "no folder"
        raise ValueError(f"{commit}: expected the file that completes a checkpoint, found {found}")
    try:
        facts: dict[str, Any] = json.loads(commit.read_text(encoding="utf8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{commit}: expected JSON, found {error}") from None
    for name, size in facts["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: expected a file of {size} bytes, found none")
        if file.stat().st_size != size:
            raise ValueError(f"{file}: expected {size} bytes, found {file.stat().st_size}")
    return facts


def committed(folder: str | Path) -> list[tuple[int, Path]]:
    """(step, path) of every folder with a COMMIT file under `folder`, oldest first."""
    found = []
    for path in Path(folder).glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / COMMIT).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def latest(folder: str | Path) -> Path | None:
    """The newest committed checkpoint under `folder`, None if there is none."""
    found = committed(folder)
    return found[-1][1] if found else None


def prune(folder: str | Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` committed checkpoints, and return what was deleted."""
    assert keep >= 1, keep
    gone = [path for _, path in committed(folder)[:-keep]]
    for path in gone:
        discard(path)
    return gone


def discard(path: str | Path) -> None:
    """Delete a checkpoint folder, its COMMIT first, so that a broken-off deletion leaves no checkpoint."""
    path = Path(path)
    (path / COMMIT).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)

"""Committed checkpoint folders: the COMMIT file, the newest checkpoint, the deletion of old checkpoints.

A checkpoint is a folder `step_000123` with a COMMIT file. COMMIT lists the size of every file of the checkpoint, and
the digests of small files. COMMIT is written by a rename, when all files are on the disk. A folder without COMMIT was
interrupted during the write and is not a checkpoint.

This module imports no torch, because the controller imports this module.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_scalerl.checkpoints.atomic_io import sync, write_durably
from megatron_scalerl.checkpoints.plain_files import is_file_name

COMMIT = "COMMIT"
DIGEST_BYTES = 16 << 20
"""COMMIT lists the SHA-256 of files up to this size (bytes): metadata, common state, controller state."""
_COMMIT_LIMIT = 64 << 20
"""Largest COMMIT file that is read (bytes)."""
_STEP = re.compile(r"step_(\d+)")


def checkpoint_path(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of `step` under `folder`."""
    return folder / f"step_{step:06d}"


def write_commit(path: Path, facts: Mapping[str, Any]) -> None:
    """Commit the folder `path`: sync all files, then write COMMIT: the keys of `facts`, the sizes of all files, and
    the digests of small files."""
    inside = [p for p in sorted(path.rglob("*")) if p != path / COMMIT]
    # COMMIT says that all files are on the disk, so the files are synced before COMMIT exists.
    for item in [*inside, path, path.parent]:
        sync(item)
    files = {str(p.relative_to(path)): p for p in inside if p.is_file()}
    content = {
        **facts,
        "files": {name: file.stat().st_size for name, file in files.items()},
        "sha256": {name: _digest(file) for name, file in files.items() if file.stat().st_size <= DIGEST_BYTES},
    }
    write_durably(path / COMMIT, json.dumps(content, indent=1).encode())


def read_commit(path: Path) -> dict[str, Any]:
    """The content of COMMIT, after checking that every file of the checkpoint is complete.

    Raises ValueError, naming the file, for a folder that is missing or not committed, and for a file that is missing,
    or whose size or digest differs from COMMIT.
    """
    commit = path / COMMIT
    if not commit.is_file():
        raise ValueError(
            f"{commit}: this file does not exist, so the checkpoint was never completed; take another checkpoint"
        )
    facts = _facts(commit)
    digests = facts["sha256"]
    for name, size in facts["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: this file of the checkpoint is missing")
        if file.stat().st_size != size:
            raise ValueError(f"{file}: the file has {file.stat().st_size} bytes, but {COMMIT} lists {size}")
        # COMMIT has no digests of large files: computing the digests would delay every start by minutes.
        if name in digests and digests[name] != _digest(file):
            raise ValueError(f"{file}: the content has changed: the SHA-256 differs from {COMMIT}'s")
    return facts


class _Facts(msgspec.Struct):
    files: dict[str, Annotated[int, Meta(ge=0)]]
    sha256: dict[str, str] = {}
    step: Annotated[int, Meta(ge=0)] = 0


def _facts(commit: Path) -> dict[str, Any]:
    size = commit.stat().st_size
    if size > _COMMIT_LIMIT:
        raise ValueError(f"{commit}: the file has {size} bytes; a valid COMMIT has at most {_COMMIT_LIMIT}")
    try:
        facts: dict[str, Any] = msgspec.json.decode(commit.read_bytes(), type=dict[str, Any])
        checked = msgspec.convert(facts, _Facts)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{commit}: the file is not a JSON list of the checkpoint's files: {error}") from None
    for name in [*checked.files, *checked.sha256]:
        if len(name) > 4000 or not all(is_file_name(part) for part in name.split("/")):
            raise ValueError(f"{commit}: {name[:100]!a} is not the path of a file in the checkpoint")
    return {"sha256": {}, **facts}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every folder with a COMMIT file under `folder`, oldest first."""
    checkpoints = []
    for path in folder.glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / COMMIT).is_file():
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)


def latest(folder: Path) -> Path | None:
    """The newest committed checkpoint under `folder`; None if there is no checkpoint."""
    return next((path for _, path in reversed(committed(folder))), None)


def latest_whole(folder: Path, check: Callable[[Path], object] = read_commit) -> tuple[Path | None, list[str]]:
    """The newest committed checkpoint that `check` accepts, and a line about each newer, rejected checkpoint.

    check: a function that raises ValueError or OSError, naming the damage, for a checkpoint to reject. Returns (None,
    []) if nothing was committed yet. Raises RuntimeError if every checkpoint is damaged.
    """
    damaged = []
    for _, path in reversed(committed(folder)):
        try:
            check(path)
        except (ValueError, OSError, RecursionError, OverflowError) as error:
            problem = str(error)
            if not problem.startswith(str(path)):
                problem = f"{path}: {problem}"
            damaged.append(problem)
            continue
        return path, damaged
    if damaged:
        raise RuntimeError(f"{folder}: every checkpoint is damaged: {'; '.join(damaged)}")
    return None, damaged


def prune(folder: Path, keep: int, *, newest: int) -> list[Path]:
    """Delete checkpoint folders, committed or not, except the `keep` newest committed checkpoints up to step
    `newest`.

    newest: step of the checkpoint that was just written. Committed checkpoints of later steps, which were found
    damaged when the run started, are neither counted nor deleted: the run replaces each on reaching the step again.
    Only the run's controller may call this function, while no checkpoint is being written. Returns the deleted
    folders.
    """
    assert keep >= 1, keep
    checkpoints = committed(folder)
    kept_folders = [path for step, path in checkpoints if step <= newest][-keep:]
    kept_folders += [path for step, path in checkpoints if step > newest]
    deleted = [p for p in sorted(folder.glob("step_*")) if _STEP.fullmatch(p.name) and p not in kept_folders]
    for path in deleted:
        discard(path)
    return deleted


def discard(path: Path) -> None:
    """Delete a checkpoint folder. COMMIT is deleted first, so that an interrupted deletion leaves no checkpoint."""
    (path / COMMIT).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)

"""STUDY/, the folder of a study: what it runs, its lock, and what has finished.

study.json       files that all runs share, with their digests
recipes/         NAME.yaml, the whole recipe of each run; NAME is RECIPE_seedN
runs/            an ordinary run folder each
runs.jsonl       one line per end of a run: exit code, seconds
logs/            NAME.log, what `train` printed
replaced/        runs of recipes that were changed, after --redo
table.md comparison.json study.png curves.png study.html
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.atomic_io import lock_file, write_durably
from megatron_scalerl.checkpoints.jsonl import append_row, read_jsonl, rewrite
from megatron_scalerl.fit.inputs import differing
from megatron_scalerl.processes.signals import IN_USE_CODE
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import RecipeError, dump_recipe, read_yaml
from megatron_scalerl.recipe.tasks import tasks_of

SHARED = ("policy.path", "policy.megatron_path", "prompts.", "validation.")
"""Settings that all recipes of a study have in common, or sections of them."""
READERS = 4
"""Files that are read at a time for their digests."""


class StudyInUse(ValueError):
    """Another process works in the folder; it may end soon."""

    exit_code = IN_USE_CODE


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a study."""

    arm: str
    """Name of its recipe in the study."""
    seed: int
    recipe: Recipe
    """Whole, with name, seed and folder of the run."""
    file: Path
    """The recipe in STUDY/recipes."""
    log: Path
    """What `train` prints."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.recipe.name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.run_dir)


def planned(study: Path, arm: str, recipe: Recipe) -> PlannedRun:
    """The run of an arm's recipe, which has its seed, in a study's folder."""
    name = f"{arm}_seed{recipe.seed}"
    return PlannedRun(
        arm=arm,
        seed=recipe.seed,
        recipe=recipe.model_copy(update={"name": name, "output_dir": str(study / "runs")}),
        file=study / "recipes" / f"{name}.yaml",
        log=study / "logs" / f"{name}.log",
    )


class StudyFolder:
    """The folder of a study, locked by one process at a time."""

    def __init__(self, path: str | Path) -> None:
        """Create or reopen. Raises StudyInUse if it is locked, RecipeError for a folder with other files."""
        self.path = Path(path)
        if self.path.exists() and not (self.path / "lock").exists() and any(self.path.iterdir()):
            raise RecipeError(f"{self.path}: expected an empty folder or a study, found other files")
        for name in ("recipes", "runs", "logs"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path / "lock")

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def begin(self, runs: Sequence[PlannedRun], *, redo: bool) -> list[str]:
        """Record what the study runs; returns names of runs that were replaced.

        redo: move runs of changed recipes away, with changed files all. Otherwise RecipeError is raised, one line.
        """
        inputs = {os.path.abspath(path): made for path, made in _digests(runs[0].recipe).items()}
        before = self._inputs()
        other = sorted(path for path, now in inputs.items() if before.get(path, now) != now)
        changed = [run for run in self.known() if other] if redo else []
        if other and not redo:
            raise RecipeError(
                f"{other[0]}: expected the content with which the study {self.path} began, found another; --redo "
                "runs all again"
            )
        for run in runs:
            key = _changed(run)
            if key and not redo:
                raise RecipeError(f"{self.path}: {run.arm}: {key}; --redo runs it again")
            changed += [run.name] if key else []
        changed = list(dict.fromkeys(changed))
        for name in changed:
            self._replace(name)
        rewrite(self.path / "runs.jsonl", [row for row in self._rows() if row["run"] not in changed])
        text = json.dumps({"inputs": before | inputs}, indent=1, sort_keys=True) + "\n"
        write_durably(self.path / "study.json", text.encode())
        for run in runs:
            write_durably(run.file, dump_recipe(run.recipe).encode())
        return changed

    def known(self) -> list[str]:
        """Names of all runs that the study ever had, by name."""
        return sorted(file.stem for file in (self.path / "recipes").glob("*.yaml"))

    def finished(self) -> set[str]:
        """Names of the runs that made all their steps."""
        return {row["run"] for row in self._rows() if row["code"] == 0}

    def arms(self) -> dict[str, str]:
        """Run -> the arm that it is of, of every run that has ended."""
        return {row["run"]: row["arm"] for row in self._rows()}

    def failures(self) -> dict[str, int]:
        """Run -> exit code of its last end, if that was a failure."""
        last = {row["run"]: row["code"] for row in self._rows()}
        return {name: code for name, code in last.items() if code != 0}

    def ended(self, run: PlannedRun, *, code: int, seconds: float) -> None:
        """Record an end."""
        row = {"run": run.name, "arm": run.arm, "seed": run.seed, "steps": run.recipe.steps, "code": code}
        append_row(self.path / "runs.jsonl", row | {"seconds": round(seconds, 1)})

    def _rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "runs.jsonl")

    def _inputs(self) -> dict[str, str]:
        file = self.path / "study.json"
        found = json.loads(file.read_text())["inputs"] if file.exists() else {}
        return {os.path.abspath(path): made for path, made in found.items()}

    def _replace(self, name: str) -> None:
        folder = self.path / "runs" / name
        if folder.exists():
            away = self.path / "replaced"
            away.mkdir(exist_ok=True)
            folder.rename(next(p for n in range(1, 10**6) if not (p := away / f"{name}.{n}").exists()))


def lock(path: Path) -> int:
    """Descriptor of a file that is locked until it is closed. Raises StudyInUse if another process has it."""
    try:
        return lock_file(path)
    except BlockingIOError:
        raise StudyInUse(f"{path.parent}: expected a folder that no other study uses, found it locked") from None


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """Path -> digest of the files, and of those in the folders, that exist."""
    files = [f for path in paths for f in (sorted(path.iterdir()) if path.is_dir() else [path]) if f.is_file()]
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(map(str, files), pool.map(digest, files)))


def _digests(recipe: Recipe) -> dict[str, str]:
    data = [path for task in tasks_of(recipe) for path in (task.prompts.path, task.prompts.held_out_path)]
    return digests(Path(path) for path in (*data, recipe.policy.path) if path is not None)


def check_shared(runs: Sequence[PlannedRun]) -> None:
    """Raises RecipeError unless all start with one policy on one task, and are validated alike."""
    first = runs[0].recipe.model_dump(mode="json")
    for run in runs[1:]:
        for key, was, found in differing(first, run.recipe.model_dump(mode="json")):
            if key.startswith(SHARED):
                raise RecipeError(
                    f"{run.arm}: expected policy, prompts and validation of {runs[0].arm}, which all recipes of a "
                    f"study share, {key}: {was!r}, found {found!r}"
                )


def check_validated(runs: Sequence[PlannedRun]) -> None:
    """Raises RecipeError where the runs have no validations, which a study compares."""
    if runs[0].recipe.validation.every_steps == 0:
        raise RecipeError(
            f"{runs[0].arm}: validation.every_steps: expected at least 1, since a study compares validations, found 0"
        )


def _changed(run: PlannedRun) -> str:
    """The first key whose value is not that of the recipe with which the study began, with both; empty if none."""
    if not run.file.exists():
        return ""
    for key, was, found in differing(read_yaml(run.file), run.recipe.model_dump(mode="json")):
        if key != "output_dir":
            return f"expected the recipe with which the study began, {key}: {was!r}, found {found!r}"
    return ""

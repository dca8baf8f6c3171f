"""RUN/: who may write into it, which recipe it belongs to, and which life of the run this is.

    recipe.yaml      the recipe as resolved
    lives            one line per start: run id, number of the life, when
    journal.jsonl    rollouts/ ledger.jsonl metrics.jsonl validation.jsonl tensorboard/ logs/ checkpoints/
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe_file import RecipeError, dump_recipe
from megatron_scalerl.trainer import commit

MAY_CHANGE = frozenset({"steps", "checkpoint.every_steps", "checkpoint.keep", "forecast.fit_until_share"})
"""Keys that a restart may change without being another run."""


class RunFolder:
    """The folder of one run, held by one controller at a time."""

    def __init__(self, recipe: Recipe) -> None:
        """Create or reopen. Raises RecipeError where the folder belongs to another recipe or is in use."""
        self.path = Path(recipe.run_dir)
        self._check_recipe(recipe)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        for name in ("logs", "checkpoints", "rollouts"):
            (self.path / name).mkdir(exist_ok=True)
        self.recipe_file = self.path / "recipe.yaml"
        temporary = self.path / "recipe.yaml.tmp"
        temporary.write_text(dump_recipe(recipe), encoding="utf8")
        os.replace(temporary, self.recipe_file)
        self.run_id, self.incarnation = self._begin_life()

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of this step goes."""
        return commit.checkpoint_path(self.path / "checkpoints", step)

    def latest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint. Raises ValueError naming a file of it that is missing."""
        found = commit.latest(self.path / "checkpoints")
        if found is not None:
            commit.read_commit(found)
        return found

    def keep_checkpoints(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints."""
        commit.prune(self.path / "checkpoints", keep)

    def close(self) -> None:
        """Let another controller in."""
        os.close(self._lock)

    def _check_recipe(self, recipe: Recipe) -> None:
        found = self.path / "recipe.yaml"
        if not found.exists():
            if self.path.exists() and any(self.path.iterdir()):
                raise RecipeError(f"{self.path}: expected an empty folder or a run, found files without recipe.yaml")
            return
        before = dict(_flat(yaml.safe_load(found.read_text(encoding="utf8"))))
        now = dict(_flat(recipe.model_dump(mode="json")))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and key not in MAY_CHANGE:
                raise RecipeError(
                    f"{self.path}: expected the recipe of the run in it, {key}: {before.get(key)!r}, "
                    f"found {now.get(key)!r}; choose another name or output_dir"
                )

    def _take_lock(self) -> int:
        lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise RecipeError(f"{self.path}: expected a folder that no run writes to, found it locked") from None
        return lock

    def _begin_life(self) -> tuple[str, str]:
        """(run id, incarnation): `JOB_ID.RESTART_COUNT` on Slurm, else the number of this start."""
        path = self.path / "lives"
        lives = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        run_id = lives[0]["run_id"] if lives else secrets.token_hex(8)
        job = os.environ.get("SLURM_JOB_ID")
        incarnation = f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else f"local.{len(lives)}"
        with open(path, "a", encoding="utf8") as file:
            file.write(json.dumps({"run_id": run_id, "incarnation": incarnation, "unix_time": time.time()}) + "\n")
        return run_id, incarnation


def _flat(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value

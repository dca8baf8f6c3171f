"""The policy that all runs of a study start with, made once: supervised training, the tiny task.

CACHE/KEY/       KEY is a digest of everything that determines the content
  key.json       that, in words
  task/          the tiny task and its untrained policy
  policy/        the warm-started policy
  megatron/      the same as a Megatron checkpoint
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.commands.study.folder import digests
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import RecipeError, load_recipe
from megatron_scalerl.tiny.build import FORMAT, TinyArguments

TINY = TinyArguments(seed=1, train_prompts=1000)
"""The tiny task of a study."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One program that makes a part of the cache."""

    name: str
    """What it makes, for the log's name and the terminal."""
    argv: tuple[str, ...]
    """Arguments of `python -m`."""
    draft: Path
    """What it writes."""
    made: Path
    """The name that the draft gets when the program has ended well; the step is left out if it exists."""


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """What has to be made before the first run."""

    folder: Path
    """CACHE/KEY."""
    key: str
    """Content of key.json."""
    overrides: tuple[str, ...]
    """Settings that name the made files, for every recipe."""
    steps: tuple[Step, ...]
    """In their order."""

    @property
    def missing(self) -> list[Step]:
        """The steps that are left."""
        return [step for step in self.steps if not step.made.exists()]


def tiny_warm_start(base: Path, cache: Path, overrides: Sequence[str]) -> WarmStart:
    """The tiny task and its policy, warm-started by the base's section sft. Raises RecipeError."""
    recipe = load_recipe(base, overrides)
    facts = {"tiny": {"format": FORMAT, **asdict(TINY)}, **_facts(recipe)}
    folder, key = _entry(cache, facts)
    task = folder / "task"
    files = (
        f"prompts.path={task / 'prompts.jsonl'}",
        f"prompts.held_out_path={task / 'held_out.jsonl'}",
        f"sft.path={task / 'sft.jsonl'}",
    )
    counts = ("--seed", str(TINY.seed), "--train-prompts", str(TINY.train_prompts))
    make = Step(name="task", argv=("megatron_scalerl.tiny", str(task), *counts), draft=task, made=task / "tiny.json")
    settings = (*overrides, *files)
    return _warm_start(base, (folder, key), task / "base_policy", settings, files, (make,))


def warm_start(base: Path, policy: Path, cache: Path, overrides: Sequence[str]) -> WarmStart:
    """`policy` (a Hugging Face folder), warm-started by the base's section sft. Raises RecipeError."""
    recipe = load_recipe(base, overrides)
    if not (policy / "config.json").is_file():
        raise RecipeError(f"--warm-start: expected a Hugging Face folder with config.json, found {policy}")
    if recipe.sft.path is None:
        raise RecipeError(f"{base}: sft.path: expected the examples of the warm start, found none")
    facts = {"files": digests([policy, Path(recipe.sft.path)]), **_facts(recipe)}
    return _warm_start(base, _entry(cache, facts), policy, overrides, (), ())


def begin(made: WarmStart) -> None:
    """Create the folder in the cache."""
    made.folder.mkdir(parents=True, exist_ok=True)
    write_durably(made.folder / "key.json", made.key.encode())


def prepare(step: Step) -> None:
    """Remove what a step that was interrupted has left."""
    step.draft.parent.mkdir(parents=True, exist_ok=True)
    if step.name == "policy":
        shutil.rmtree(step.draft, ignore_errors=True)


def finish(step: Step) -> None:
    """Give the draft its name. Raises RuntimeError if the program has not written it."""
    if step.draft != step.made.parent and step.draft != step.made:
        step.draft.rename(step.made)
    if not step.made.exists():
        raise RuntimeError(f"{step.made}: expected what {' '.join(step.argv[:3])} writes, found nothing")


def _warm_start(
    base: Path,
    entry: tuple[Path, str],
    policy: Path,
    settings: Sequence[str],
    files: tuple[str, ...],
    before: tuple[Step, ...],
) -> WarmStart:
    folder, key = entry
    made, draft = folder / "policy", folder / "policy.draft"
    argv = ("megatron_scalerl", "sft", str(base), *settings, f"policy.path={policy}", "--out", str(draft))
    steps = (*before, Step(name="policy", argv=argv, draft=draft, made=made))
    return WarmStart(folder=folder, key=key, overrides=(*files, f"policy.path={made}"), steps=steps)


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe determines its warm start."""
    sft = {key: value for key, value in recipe.sft.model_dump(mode="json").items() if key != "path"}
    optimizer = {"weight_decay": recipe.optimizer.weight_decay, "clip_grad": recipe.optimizer.clip_grad}
    return {"sft": sft, "optimizer": optimizer, "seed": recipe.seed, "dtype": recipe.policy.dtype}


def _entry(cache: Path, facts: dict[str, Any]) -> tuple[Path, str]:
    """(folder in the cache, key.json) of a content that these facts determine."""
    text = json.dumps(facts, sort_keys=True, indent=1) + "\n"
    return cache / hashlib.sha256(text.encode()).hexdigest()[:12], text

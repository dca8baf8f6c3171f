"""The folder of a run: lock, recipe, attempts, and the checkpoint from which the run resumes.

recipe.yaml      the resolved recipe
attempts.jsonl   one line per attempt: run id, incarnation (the attempt's name), time
engines.jsonl    one line per change of an engine's state
checkpoints.jsonl  one line per checkpoint: seconds that the checkpoint took
slurm/           job script and outputs of a run that was submitted to Slurm
end.json         the reason why the latest finished attempt ended
further files    journal.jsonl rollouts/ ledger.jsonl metrics.jsonl validation.jsonl tensorboard/ logs/ checkpoints/

docs/runs.md says when each file is written.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_scalerl.checkpoints import commit
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl, rewrite
from megatron_scalerl.fit.inputs import differing
from megatron_scalerl.launch.placement import Attempt
from megatron_scalerl.processes.signals import IN_USE_CODE
from megatron_scalerl.prompts.dataset import PROMPTS_CHANGED
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import RecipeError, dump_recipe, read_run_recipe
from megatron_scalerl.recipe.other_names import OF_OLD_MEGATRON
from megatron_scalerl.recipe.parallel_layout import LEFT_KEYS, MODEL_KEYS, sizes_of
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.history import History, check_groups
from megatron_scalerl.rollouts.journal import Position

logger = logging.getLogger(__name__)

_SIZES = ("tensor_model", "pipeline_model", "context", "expert_tensor", "expert_model")
_LAYOUT = frozenset(
    {
        "trainer.world_size",
        *(f"megatron.parallel.{kind}_parallel_size" for kind in _SIZES),
        *(f"megatron.model.{key}" for key in MODEL_KEYS),
    }
)
"""Keys of the trainer's parallel layout. A checkpoint loads in another layout, which
tests/distributed/test_dp_trainer.py checks."""
MAY_CHANGE = _LAYOUT | frozenset(
    {
        "steps",
        "output_dir",
        "download",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "checkpoint.async_save",
        "checkpoint.rollouts",
        "forecast.fit_until_share",
        "cost.price_per_device_hour",
        "cost.currency",
        # If a change of one of the next three keys changes prompts, prompts.digest changes and the run is refused.
        "prompts.preset",
        "prompts.prompt_column",
        "prompts.answer_column",
        # The server that an algorithm of the user asks may have moved to another address.
        "algorithm.settings.url",
        "environment.timeout_s",
        "environment.episode_timeout_s",
        "environment.workers",
        "environment.memory_mb",
        "environment.variables",
        "rewards.workers",
        "rewards.concurrency",
        "rollouts.decoders",
        "trainer.micro_batch_tokens",
        "trainer.logit_workspace_mb",
        "trainer.start_timeout_s",
        "trainer.step_timeout_s",
        "trainer.max_restarts",
        "engine.max_restarts",
        "engine.min_engines",
        "engine.min_relative_rate",
        "engine.start_timeout_s",
        "engine.stall_timeout_s",
        "engine.first_token_timeout_s",
        "evaluation.every_steps",
        "evaluation.files",
        "evaluation.task",
        "evaluation.generations",
        "evaluation.seed",
        "telemetry.metrics_port",
        "telemetry.metrics_host",
        "telemetry.metrics_access",
        # The next five keys no longer exist. Recipes of older runs still have these keys.
        "telemetry.trace_steps",
        "weights.anchor_every",
        "weights.store",
        "weights.store_gib",
        "weights.transaction",
        "telemetry.profile_steps",
        "weights.timeout_s",
        "weights.connect_timeout_s",
        *OF_OLD_MEGATRON,
        # The next keys no longer exist. Keys for the first and last pipeline stage replace the old keys.
        *(f"megatron.model.{key}" for key in LEFT_KEYS),
        "engine.vllm.override_generation_config",
    }
)
"""Keys of the recipe that may differ between attempts of a run. A change of any other key is refused."""

RECORDS = ("ledger.jsonl", "metrics.jsonl", "validation.jsonl")
"""Files in RUN/ from which the run's learning curve is made."""
ATTEMPTS = "attempts.jsonl"
SAVES = "checkpoints.jsonl"
END = "end.json"
SLURM = "slurm"
"""Folder in RUN/ that the command `slurm` fills before the first attempt."""
_FOLDERS = ("logs", "checkpoints", "rollouts")
_BEFORE_RECIPE = frozenset({"lock", ".recipe.yaml.draft", "recipe.yaml.tmp", *_FOLDERS})
"""Files and empty folders that an attempt may leave in RUN/ if killed before recipe.yaml is written."""


class RunState:
    """How far an attempt has come: steps, batches and policy version. Only the training loop changes the object."""

    def __init__(self, *, step: int, batches: int, served: int = -1):
        self.step = step
        """Optimizer steps of the trainer, equal to the trainer's policy version."""
        self.batches = batches
        """Batches of the run so far, including batches without a step; a batch trained again counts once."""
        self.served = served
        """Policy version of the last weight update; -1 before the first update."""
        self.digest = ""
        """Digest of the weights of version `served`."""


@record
class ResumePoint:
    """The state from which an attempt starts."""

    checkpoint: Path | None = None
    """The folder of the checkpoint; None to start from the recipe's policy."""
    step: int = 0
    """Optimizer steps in the checkpoint."""
    batches: int = 0
    """Batches of the run up to the checkpoint, batches without a step included."""
    position: Position | None = None
    """End of the journal at the checkpoint; None without a checkpoint."""
    record_rows: tuple[tuple[str, int], ...] = ()
    """(name of a file of RECORDS, number of rows at the checkpoint), as in `ControllerState`."""
    damaged: tuple[str, ...] = ()
    """One line about each damaged checkpoint that is newer than `checkpoint`."""


class Resumed:
    """The checkpoint and the journal from which an attempt goes on."""

    def __init__(self, start: ResumePoint, history: History):
        self.start = start
        self.history = history
        """The journal of earlier attempts, with up to a million events. Set to `NO_HISTORY` after the replay."""


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """controller.json of a checkpoint: how much of the run's records the checkpoint includes."""

    step: Annotated[int, Meta(ge=0)]
    """Optimizer steps in the checkpoint."""
    batches: Annotated[int, Meta(ge=0)]
    """Batches of the run up to the checkpoint, batches without a step included."""
    run_id: str
    position: Position
    """End of the journal at the moment of the checkpoint."""
    record_rows: dict[str, int] = {}
    """Name of a file of RECORDS -> number of rows at the checkpoint (`rows_of`). If a resume finds fewer rows, the
    file has lost data."""


class RunInUse(RecipeError):
    """Another controller has locked the run's folder. The command may succeed once that controller ends."""

    exit_code = IN_USE_CODE


class RunFolder:
    """The folder of one run, locked by one controller at a time."""

    def __init__(self, recipe: Recipe):
        """Create or reopen the run's folder, lock the folder, and begin an attempt.

        Raises RecipeError if the folder holds a run of another recipe or foreign files, and RunInUse if another
        controller has locked the folder.
        """
        self.path = recipe.run_dir
        # Before this check nothing is written, because the folder may have foreign files.
        check_recipe(recipe)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"output_dir: {self.path} cannot be made: {error.strerror}") from None
        self._lock = self._take_lock()
        try:
            # Before the lock, another controller could have written a recipe.
            check_recipe(recipe)
            for name in _FOLDERS:
                (self.path / name).mkdir(exist_ok=True)
            write_durably(self.path / "recipe.yaml", dump_recipe(recipe).encode())
            self.attempt = self.begin_attempt()
        except BaseException:
            os.close(self._lock)
            raise

    def checkpoint(self, step: int) -> Path:
        """Path of the checkpoint of this step."""
        return commit.checkpoint_path(self.path / "checkpoints", step)

    def keep_checkpoints(self, keep: int, *, newest: int) -> None:
        """Delete uncommitted checkpoints, and all but the `keep` newest checkpoints up to step `newest`."""
        commit.prune(self.path / "checkpoints", keep, newest=newest)

    def kept_batches(self, keep: int) -> int:
        """Number of batches that all kept checkpoints include; no resume needs the rollouts of these batches.

        Returns 0, so that no rollouts are deleted, while there are fewer than `keep` checkpoints, and if a checkpoint
        cannot be read.
        """
        paths = [path for _, path in commit.committed(self.path / "checkpoints")]
        if len(paths) < keep:
            return 0
        try:
            return min(controller_state(path).batches for path in paths)
        except ValueError as error:
            logger.warning("no rollouts are deleted, because a checkpoint cannot be read: %s", error)
            return 0

    def end(self, reason: str, *, step: int, final: bool, gave_up: bool) -> None:
        """Write end.json: the attempt finished.

        final: True if the run cannot resume, even with a larger `steps`. gave_up: True if the run ended for lack of
        progress.
        """
        state = {"step": step, "final": final, "gave_up": gave_up, "incarnation": self.attempt.incarnation}
        rewrite(self.path / END, [{"reason": reason} | state])

    def saved(self, step: int, *, seconds: float, stopped_seconds: float) -> None:
        """Append a line to checkpoints.jsonl. seconds: duration of the checkpoint. stopped_seconds: the part in which
        training stopped."""
        times = {"seconds": round(seconds, 3), "stopped_seconds": round(stopped_seconds, 3)}
        with contextlib.closing(JsonlWriter(self.path / SAVES)) as file:
            file.append({"step": step, **times, "incarnation": self.attempt.incarnation})

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def _take_lock(self) -> int:
        # Only the owner may read the lock file: a user who can read the file can lock the file and block the run.
        lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.fchmod(lock, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            # A locked file gives EWOULDBLOCK, or EACCES over NFS, where Linux uses an fcntl lock instead of flock.
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise RunInUse(f"{self.path}: another controller has locked the folder; end that run first") from None
            raise RecipeError(
                f"{self.path}/lock cannot be locked (flock): {error.strerror}; choose an output_dir on another file "
                "system"
            ) from None
        return lock

    def begin_attempt(self) -> Attempt:
        """Append the start of an attempt to attempts.jsonl. A restart of the trainer also begins an attempt.

        The incarnation is the attempt's name: `local.N`, or `JOB_ID.RESTART_COUNT` on Slurm. A name that was used
        before gets a suffix `-N`.
        """
        path = self.path / ATTEMPTS
        attempts = read_jsonl(path)
        run_id = attempts[0]["run_id"] if attempts else secrets.token_hex(8)
        incarnation = f"local.{len(attempts)}"
        job = os.environ.get("SLURM_JOB_ID")
        if job:
            incarnation = f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        earlier_attempts = sum(row["incarnation"].split("-")[0] == incarnation for row in attempts)
        if earlier_attempts:
            incarnation += f"-{earlier_attempts}"
        with contextlib.closing(JsonlWriter(path)) as file:
            file.append({"run_id": run_id, "incarnation": incarnation, "unix_time": time.time()})
            file.sync()
        return Attempt(
            run_id=run_id, incarnation=incarnation, folder=self.path, recipe_file=self.path / "recipe.yaml"
        )


def check_recipe(recipe: Recipe) -> None:
    """Raises RecipeError if the folder has files but no run, or if a key that may not change differs."""
    folder = recipe.run_dir
    if not (folder / "recipe.yaml").exists():
        if folder.exists() and not all(_is_leftover(item) for item in folder.iterdir()):
            raise RecipeError(
                f"{folder}: the folder has files but no recipe.yaml, so it is no run; choose an empty folder"
            )
        return
    settings = read_run_recipe(folder)
    _check_experts(folder, (settings.get("megatron") or {}).get("parallel") or {}, recipe)
    # Recipes of older runs have no policy digest, so the digest is not compared.
    if not (settings.get("policy") or {}).get("digest"):
        recipe = recipe.with_settings(policy={"digest": None})
    differences = differing(settings, recipe.model_dump(mode="json"))
    # policy.digest is checked last: if policy.path also differs, the message should name the path.
    for key, was, now in sorted(differences, key=lambda difference: difference[0] == "policy.digest"):
        if key == "prompts.digest":
            raise RecipeError(f"{folder}: {PROMPTS_CHANGED} since the run began; restore it, or set another name")
        if not _may_change(key):
            raise RecipeError(
                f"{folder}: {key} is {was!r} in the run's recipe and {now!r} here; choose another name or output_dir"
            )


def resume_point(run_dir: Path) -> ResumePoint:
    """The newest checkpoint of a run whose files have the sizes, and small files the digests, that COMMIT states.

    Raises RuntimeError if there are checkpoints and all are damaged.
    """

    def state_of(path: Path) -> ControllerState:
        commit.read_commit(path)
        return controller_state(path)

    path, damaged = commit.latest_whole(run_dir / "checkpoints", state_of)
    if path is None:
        return ResumePoint()
    state = controller_state(path)
    return ResumePoint(
        checkpoint=path,
        step=state.step,
        batches=state.batches,
        position=state.position,
        record_rows=tuple(state.record_rows.items()),
        damaged=tuple(damaged),
    )


def check_history(run_dir: Path, history: History, start: ResumePoint) -> None:
    """Raises RuntimeError if the journal, the rollouts or a file of RECORDS lost data since the checkpoint."""
    journal = run_dir / "journal.jsonl"
    if len(history.batches) < start.batches:
        raise RuntimeError(
            f"{journal}: has {len(history.batches)} batches, and had {start.batches} when {start.checkpoint} was "
            "saved; restore the file from a copy"
        )
    for name, rows in start.record_rows:
        record = run_dir / name
        remaining = rows_of(record)
        if remaining < rows:
            raise RuntimeError(
                f"{record}: has {remaining} rows, and had {rows} when {start.checkpoint} was saved; the run's curve "
                "would be wrong: restore the file from a copy"
            )
    charged = max((row["batch"] for row in read_jsonl(run_dir / "ledger.jsonl") if "role" in row), default=0)
    if charged < len(history.batches):
        raise RuntimeError(
            f"{run_dir}/ledger.jsonl: has charges of {charged} batches, and the journal {len(history.batches)} "
            "batches; the run's curve would be wrong: restore the file from a copy"
        )
    position = start.position
    if position is not None:
        size = journal.stat().st_size if journal.exists() else 0
        if size < position.journal_bytes:
            raise RuntimeError(
                f"{journal}: has {size} bytes, and had {position.journal_bytes} when {start.checkpoint} was saved; "
                "restore the file from a copy"
            )
    try:
        check_groups(run_dir, history, start.batches)
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def rows_of(record: Path) -> int:
    """Number of complete rows of a record file. Heartbeats, which a restart removes, do not count."""
    if not record.exists():
        return 0
    with record.open("rb") as file:
        return sum(line.endswith(b"\n") and not line.startswith(b'{"heartbeat"') for line in file)


def finished(recipe: Recipe, point: ResumePoint) -> str | None:
    """The reason why the recipe's run is finished at this resume point; None if steps or a validation remain."""
    folder = recipe.run_dir
    if point.checkpoint is None:
        return None
    for end in read_jsonl(folder / END):
        if end.get("final") and end.get("step") == point.step:
            return str(end["reason"])
    validated = {row["step"] for row in read_jsonl(folder / "validation.jsonl")}
    if point.step < recipe.steps or (recipe.validation.every_steps and point.step not in validated):
        return None
    return f"all {point.step} steps are made"


def controller_state(checkpoint: Path) -> ControllerState:
    """The controller's state in a checkpoint. Raises ValueError with the file's name if the file cannot be read."""
    file = checkpoint / "controller.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=ControllerState)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the controller's state cannot be read: {error!r}") from None


def _check_experts(folder: Path, earlier_layout: Mapping[str, Any], recipe: Recipe) -> None:
    """Raises RecipeError if the expert-parallel size changed, since loading such a checkpoint is not tested."""
    old = sizes_of(earlier_layout)
    new = sizes_of(recipe.megatron.parallel)
    if old.ep != new.ep:
        was, now = (f"TP {s.tp}, PP {s.pp}, CP {s.cp}, EP {s.ep}" for s in (old, new))
        raise RecipeError(
            f"{folder}: megatron.parallel.expert_model_parallel_size was {old.ep} ({was}) and is {new.ep} ({now}); "
            "within a run, only tensor, pipeline, context and data-parallel sizes may change"
        )


def _may_change(key: str) -> bool:
    parts = key.split(".")
    if parts[:2] == ["prompts", "tasks"]:
        key = ".".join(parts[3:])
        return key in MAY_CHANGE or f"rewards.{key}" in MAY_CHANGE
    return key in MAY_CHANGE


def _is_leftover(item: Path) -> bool:
    return item.name == SLURM or (item.name in _BEFORE_RECIPE and not (item.is_dir() and any(item.iterdir())))

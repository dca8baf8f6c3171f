"""Engines that join while the trainer steps get the weights that the others serve from the store of weights.

The trainer's senders write what they broadcast into files (`weights.transport.store`). An engine that joins reads the
last whole update and those of changes after it, which its receiver takes as it takes them from the trainer: every
bucket is checked, and the digests of what arrived and of what it holds are compared with those of the last update.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from megatron_scalerl.controller.weight_phases import PhaseFailed, Phases, verify
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.processes.spans import spanned
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.weights.plan import Connection, Manifest, SendReport
from megatron_scalerl.weights.transport import STORE_BACKEND
from megatron_scalerl.weights.transport.store import is_stored, stored_anchor

logger = logging.getLogger(__name__)

T = TypeVar("T")
NeedsOf = Callable[[EngineClient, Manifest], Awaitable[list[str]]]
CaughtUp = Literal["served", "left", "hangs"]
"""left: to the trainer. hangs: the engine, which must not take part in an update."""

_NOTE = "weight_store"
"""File of the run's folder with the path of its store, as long as that is there."""

_POLL_S = 0.05
"""Between two looks whether the senders have written a version."""
_BEGIN_S, _END_S = 1.0, 60.0
"""Within which they begin to, and have to be done: a weight update waits for an engine that waits for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """What senders and engines agreed on when they connected."""

    connection: Connection
    manifest: Manifest
    shards: tuple[str, ...]
    """What the workers of each need, as JSON."""
    plans: tuple[str, ...]
    """[shards] what is sent to each, as JSON."""
    senders: int


class WeightStore:
    """What the store has of one trainer's weights."""

    def __init__(self, recipe: Recipe, folder: str) -> None:
        """folder: that the senders write to."""
        self.folder, self.bytes = folder, int(recipe.weights.store_gib * (1 << 30))
        self._recipe = recipe
        self._formed: Formed | None = None
        self._versions: list[int] = []  # published over this connection
        self._report: SendReport | None = None  # of the last one
        self._failed: set[EngineClient] = set()
        self._asked: set[EngineClient] = set()  # engines that are asked to read
        self._off = False  # something hung

    def connected(self, formed: Formed) -> None:
        """Senders and engines have connected; the next update is whole."""
        self._formed, self._versions, self._report = formed, [], None
        self._failed = set()

    def published(self, version: int, report: SendReport) -> None:
        """All engines of the connection serve a version."""
        self._versions.append(version)
        self._report = report

    def may_serve(self, engine: EngineClient) -> bool:
        """Whether an engine may get weights from here; not after it failed to, and none after something hung."""
        return not self._off and engine not in self._failed

    @spanned("weights from the store", "weight update")
    async def catch_up(self, engine: EngineClient, needs: NeedsOf, version: int) -> CaughtUp:
        """Give an engine `version`; what came of it is in the log, too.

        needs: asks what each of the engine's workers needs of the stored tensors, as JSON.
        """
        begin, limit = time.perf_counter(), self._recipe.weights.timeout_s
        try:
            async with asyncio.timeout(limit):
                versions = await self._load(engine, needs, version)
        except (PhaseFailed, OSError) as failed:  # a TimeoutError is one
            self._off = self._off or isinstance(failed, TimeoutError)
            why = str(failed) or f"{engine.name}: not read within {limit:g} s (weights.timeout_s)"
            logger.warning("weights.store: the trainer sends version %d instead: %s", version, why)
            self._failed.add(engine)
            return "hangs" if isinstance(failed, TimeoutError) and engine in self._asked else "left"
        finally:
            self._asked.discard(engine)
        if not versions:
            self._failed.add(engine)
            logger.info(
                "weights.store: it does not have version %d for %s: the trainer sends it", version, engine.name
            )
            return "left"
        seconds = time.perf_counter() - begin
        logger.info("%s: version %d in %d updates of the store, %.1f s", engine.name, version, versions, seconds)
        return "served"

    async def _load(self, engine: EngineClient, needs_of: NeedsOf, version: int) -> int:
        """The number of updates that an engine took from the store to hold `version`; 0 if it has not all of them."""
        formed, report = self._formed, self._report
        if formed is None or report is None or self._versions[-1] != version:
            return 0
        phases = Phases(2 * self._recipe.weights.timeout_s)  # all of them have one limit (`catch_up`)
        [needs] = await phases.all("needs", [engine], lambda engine: needs_of(engine, formed.manifest))
        if not set(needs) <= set(formed.shards):
            return 0
        anchor = await self._anchor(formed, version)
        if anchor is None:
            return 0
        versions = self._versions[self._versions.index(anchor) :]
        if len(set(versions)) != len(versions):  # one that was sent twice is twice in the files
            return 0
        shards = [formed.shards.index(need) for need in needs]
        connection = replace(
            formed.connection,
            backend=STORE_BACKEND,
            rendezvous=FolderRendezvous(folder=self.folder),
            group=f"{anchor}-{formed.connection.group}",
        )
        info = {
            "connection": msgspec.to_builtins(connection),
            "places": [(shard, 1) for shard in shards],
            "plans": [text if shard in shards else "" for shard, text in enumerate(formed.plans)],
        }
        clear = self._recipe.rollouts.kv_cache == "recompute"

        async def post(phase: str, path: str, body: Mapping[str, Any] | None) -> None:
            await phases.all(phase, [engine], lambda engine: engine.post(path, body))

        self._asked.add(engine)
        await post("connect", "/init_weight_transfer_engine", {"init_info": info})
        await phases.all("pause", [engine], lambda engine: engine.pause(clear_cache=clear))
        await post("start", "/start_weight_update", None)
        for each in versions:
            await post("update", "/update_weights", {"update_info": {"version": each, "staged": False}})
        await post("finish", "/finish_weight_update", {"weight_version": str(version)})
        await phases.all("verify", [engine], lambda engine: verify(engine, version, report, shards))
        await phases.all("resume", [engine], lambda engine: engine.resume())
        return len(versions)

    async def _anchor(self, formed: Formed, version: int) -> int | None:
        """`stored_anchor`, for which it waits while the senders write; None where they do not."""
        begin, place = time.monotonic(), (self.folder, formed.connection.group, formed.senders)
        while (waited := time.monotonic() - begin) < _END_S:
            found = await _within(_END_S, stored_anchor, *place, version)
            if found is not None or (waited > _BEGIN_S and not await _within(_END_S, is_stored, *place)):
                return found
            await asyncio.sleep(_POLL_S)
        return None


@contextlib.asynccontextmanager
async def weight_store(recipe: Recipe, *, first: bool = True) -> AsyncIterator[WeightStore | None]:
    """The store of weights.store, in a new folder, which is deleted at the end; None without it.

    Folders that a kill left are deleted: of the same run, which has one controller at a time, also in another parent,
    and of other runs of this user on this host. Raises RuntimeError for a folder that cannot be made; unless `first`,
    in a run that goes on, that is a warning, and None.
    """
    with contextlib.suppress(OSError):  # it hangs, or cannot be deleted
        await _within(_END_S, _delete_noted, recipe.run_dir)
    if not recipe.weights.store:
        yield None
        return
    try:
        folder, held = await _within(_END_S, _new_folder, recipe.weights.store, recipe.run_dir)
    except OSError as error:
        why = f"weights.store: {recipe.weights.store}: expected a folder for files: {error or 'no answer'}"
        if first:
            raise RuntimeError(why) from error
        logger.warning("%s; the run goes on without it", why)
        yield None
        return
    try:
        yield WeightStore(recipe, folder)
    finally:
        with contextlib.suppress(OSError):  # it hangs
            await _within(_END_S, _delete_own, folder, held, recipe.run_dir)


async def _within(seconds: float, call: Callable[..., T], *arguments: Any) -> T:
    """What a call in a thread of its own returns. Raises TimeoutError, an OSError, when it takes longer.

    Then nobody waits for the thread, neither other work nor the end of the process.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            found = call(*arguments)
        except BaseException as error:
            failure: BaseException | None = error
        else:
            failure = None
        with contextlib.suppress(RuntimeError, concurrent.futures.InvalidStateError):  # nobody waits any more
            done.set_result(found) if failure is None else done.set_exception(failure)

    threading.Thread(target=work, name="weights.store", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(done)


def _of_run(run_dir: str | Path) -> str:
    return f"msrl-weights-{hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:16]}-"


def _new_folder(parent: str, run_dir: str | Path) -> tuple[str, int]:
    """A folder with mode 0700, noted in the run's folder, and the descriptor of a lock on it. Raises OSError."""
    parent = os.path.realpath(parent)
    host = f"{zlib.crc32(socket.gethostname().encode()):08x}-"
    for path in Path(parent).glob("msrl-weights-*"):
        mine, here = path.name.startswith(_of_run(run_dir)), path.name.split("-")[3:4] == [host[:-1]]
        if mine or (here and not _is_held(path)):
            _delete(path)
    folder = tempfile.mkdtemp(prefix=_of_run(run_dir) + host, dir=parent)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(held, fcntl.LOCK_SH)
    with contextlib.suppress(OSError):  # a full disk
        (Path(run_dir) / _NOTE).write_text(folder)
    return folder, held


def _is_held(folder: Path) -> bool:
    """Whether a process may use a folder: it has a lock on it, or cannot be asked."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(opened)
    return False


def _delete_noted(run_dir: str | Path) -> None:
    """Delete the folder that an attempt of the run that was killed has noted, wherever it is."""
    note = Path(run_dir) / _NOTE
    if not note.is_file():
        return
    folder = Path(note.read_text(errors="replace"))
    if folder.is_absolute() and folder.name.startswith(_of_run(run_dir)):
        _delete(folder)
    note.unlink(missing_ok=True)


def _delete_own(folder: str, held: int, run_dir: str | Path) -> None:
    _delete(Path(folder))
    os.close(held)
    (Path(run_dir) / _NOTE).unlink(missing_ok=True)


def _delete(folder: Path) -> None:
    """Delete a folder of this user, not one that a link names."""
    with contextlib.suppress(OSError):
        if folder.lstat().st_uid == os.geteuid() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)

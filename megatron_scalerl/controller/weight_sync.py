"""Coordinates a weight update: connect, pause the engines, send, label, verify, resume.

    trainer  ── broadcast ──────────────► engines (vLLM's weight-transfer protocol)
       ▲ connect_weights, send_weights        ▲ /pause /start_weight_update /update_weights ... /resume
       └────────────── WeightSync (controller) ┘

Consumes: one version of the trainer's weights per update.
Waits for: an engine, while no engine is alive; in each phase, the answers of all members of the update (engines and,
while connecting and sending, the trainer).
Unblocked by: the answers, weights.timeout_s, and the eviction of an engine, which ends the requests to that engine.
Engines pause between two tokens and keep their requests, so no phase waits for a completion.

The life of an update (`_update`, `_send`):

    needs, digest, connect   only if the engines have changed since the last update: `_connect` makes process groups
    pause, start             the engines stop between two tokens
    update, finish, verify   the engines receive, write and label the weights, and report digests for comparison
    resume                   the engines go on, and serve the version from then on

`publish` updates every engine that is alive (`engine.membership`); an engine held for a measurement does not count as
alive. `catch_up` updates only the engines whose weights are out of date, while all other engines go on.

An engine that fails is evicted, and the update is repeated with the remaining engines. An engine serves a version
only after an update that succeeded in every phase. In `connect` and `update` one failed member makes every member
fail, so the failed member is unknown unless an engine was evicted meanwhile. The update is then tried _TRIES times.
After the last try the newcomers are evicted, that is, engines that have completed no update of this trainer. Without
newcomers, or before any engine has completed an update, WeightUpdateError is raised.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from megatron_scalerl.engine.answers import REFUSED, EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.processes.child_process import time_limit
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.trainer.client import TrainerClient, TrainerError
from megatron_scalerl.types import StepReport
from megatron_scalerl.weights.plan import (
    Connection,
    Manifest,
    SendReport,
    manifest_to_json,
    needs_from_json,
    not_covered,
    to_json,
)
from megatron_scalerl.weights.transport import resolve_transport

logger = logging.getLogger(__name__)

_TRIES = 3
"""Number of attempts at an update that fails although no engine could be evicted for the failure."""
_COLLECTIVE = ("connect", "update")
"""Phases in which the failure of one member makes every member fail."""

NO_UPDATE = {"publish_seconds": 0.0, "engine_paused_seconds": 0.0, "pinned_seconds": 0.0}
"""Metrics of a batch that no weight update follows."""


class WeightUpdateError(RuntimeError):
    """The weights could not be sent to the engines. The message names the failed members and the phase."""


class WeightsRefused(RuntimeError):
    """All engines refused the trainer's tensors in the first update. The message names engines and tensors."""


class WeightsUnchanged(RuntimeError):
    """Optimizer steps changed no value of the weights. The message names the version and describes the last step."""


class _TensorsRefused(EngineError):
    """The trainer's tensors do not match the model of one engine."""


class _Place(NamedTuple):
    """The place of one worker of an engine among the receivers of the weights."""

    shard: int
    """Number of the worker's shard. Workers that need equal parts of the tensors have one shard, and form a process
    group with the shard's sender."""
    rank: int
    """Rank in the process group; the sender has rank 0."""


class _PhaseFailed(Exception):
    """One or more engines, or the trainer, failed in a phase of an update."""

    def __init__(self, phase: str, engines: dict[EngineClient, str], lines: Sequence[str], *, all_refused: bool):
        """engines: failed engine -> line about the failure. lines: these lines, with the trainer's failure first.
        all_refused: True if every engine refused the trainer's tensors."""
        self.phase = phase
        self.engines = engines
        self.all_refused = all_refused
        super().__init__("; ".join(lines))


class _Phases:
    """The phases of one attempt at an update."""

    def __init__(self, limit_s: float):
        """limit_s: time limit for the answers in a phase (s), weights.timeout_s."""
        self._limit_s = limit_s
        self.seconds: dict[str, float] = {}
        """Phase -> seconds until all engines, and the trainer if called, had answered."""

    async def call_all(
        self,
        phase: str,
        engines: Sequence[EngineClient],
        call: Callable[[EngineClient], Awaitable[Any]],
        trainer: Awaitable[Any] | None = None,
    ) -> list[Any]:
        """Call all engines and, if given, `trainer` at the same time; returns the answers, the trainer's first.

        After all calls have ended, raises TrainerError and unexpected exceptions unchanged, and _PhaseFailed for all
        other failures.
        """
        calls = [call(engine) for engine in engines]
        if trainer is not None:
            calls.insert(0, trainer)
        begin = time.perf_counter()
        # With return_exceptions, gather waits for all calls, so no call still runs when the next try begins.
        results = await asyncio.gather(*map(self._limited, calls), return_exceptions=True)
        self.seconds[phase] = time.perf_counter() - begin
        for result in results:
            # TrainerError is a RuntimeError, too, but is raised: the trainer has failed, so no retry can succeed.
            is_failed_member = isinstance(result, RuntimeError | ValueError | OSError)
            if isinstance(result, TrainerError) or (isinstance(result, BaseException) and not is_failed_member):
                raise result
        failed = {
            engine: f"{engine.name}: {phase}: {_line(result)}"
            for engine, result in zip(engines, results[-len(engines) :])
            if isinstance(result, Exception)
        }
        lines = list(failed.values())
        if trainer is not None and isinstance(results[0], Exception):
            lines.insert(0, f"trainer: {phase}: {_line(results[0])}")
        if lines:
            all_refused = all(isinstance(result, _TensorsRefused) for result in results)
            raise _PhaseFailed(phase, failed, lines, all_refused=all_refused)
        return results

    async def _limited(self, call: Awaitable[Any]) -> Any:
        try:
            async with time_limit(self._limit_s):
                return await call
        except TimeoutError as err:
            raise RuntimeError(f"no answer within {self._limit_s:g} s (weights.timeout_s)") from err


@record
class WeightUpdate:
    """A finished weight update, with times and bytes."""

    version: int
    """Policy version that the updated engines serve."""
    seconds_paused: float
    """Seconds from the moment when all engines are paused until the first engine resumes."""
    seconds_total: float
    """Seconds of the update from begin to end, including connecting and attempts that failed."""
    phases: Mapping[str, float]
    """Phase of the last attempt -> seconds until all members had answered.

    `needs`, `digest` and `connect` occur only if the engines have changed. `update` covers packing, sending,
    receiving and writing. `pause`, `start`, `finish`, `verify` and `resume` always occur.
    """
    seconds_sending: float
    """Seconds in which the trainer packed and sent the weights, measured by the trainer's rank 0."""
    bytes: int
    """Bytes that all sending ranks of the trainer sent, padding included."""
    whole_bytes: int
    """Bytes that all sending ranks of the trainer would have sent with weights.deltas off."""
    most_sent: int
    """Largest number of bytes that one sending rank of the trainer sent."""
    most_received: int
    """Largest number of bytes that one worker of an engine received."""
    digest: str
    """Digest of the weights' values, by shard; does not depend on the trainer's layout (`weights.digest`)."""

    def metrics(self) -> dict[str, Any]:
        """The metrics of the update for metrics.jsonl."""
        return {
            "publish_seconds": self.seconds_total,
            "engine_paused_seconds": self.seconds_paused,
            "weight_bytes": float(self.bytes),
            "weight_whole_bytes": float(self.whole_bytes),
            "weight_most_sent_bytes": float(self.most_sent),
            "weight_most_received_bytes": float(self.most_received),
            "weight_send_seconds": self.seconds_sending,
            "weight_gb_per_s": self.bytes / 1e9 / max(self.phases["update"], 1e-9),
            **{f"weight_{phase}_seconds": seconds for phase, seconds in self.phases.items()},
            "weight_digest": self.digest,
        }


class WeightSync:
    """The weight updates of one trainer and the engines; one update at a time."""

    def __init__(self, trainer: TrainerClient, engines: Membership, recipe: Recipe):
        self._trainer = trainer
        self._engines = engines
        self._recipe = recipe
        self._connected: dict[EngineClient, list[_Place]] = {}
        """Engine of the last update -> places of the engine's workers; empty after a failed update."""
        self._sent_changes = False
        """True if the last update sent changes, not whole tensors (weights.deltas)."""
        self._proven: list[EngineClient] = []
        """The engines that have completed an update of this trainer."""
        self._steps: list[StepReport] = []
        """The trainer's reports of the optimizer steps since the last version was published."""
        self._last: WeightUpdate | None = None
        """The last version that was published."""
        self._lock = asyncio.Lock()

    def trained(self, report: StepReport) -> None:
        """Note an optimizer step. `publish` checks whether the noted steps have changed the weights."""
        self._steps.append(report)

    async def publish(self, version: int) -> WeightUpdate:
        """Send the trainer's weights, labeled with `version`, to every engine that is alive.

        Waits while no engine is alive but an engine may still join. Raises WeightUpdateError if no engine is left or
        all tries fail, WeightsRefused if the first engines' models do not match, WeightsUnchanged if steps with a
        gradient changed no value since the last version, and TrainerError if the trainer failed.
        """
        while True:
            await self._engines.until(lambda: bool(self._engines.alive) or not self._engines.left)
            if not self._engines.alive:
                raise WeightUpdateError(f"no engine is left: {self._engines.given_up_because}")
            update = await self._update(version, lambda: self._engines.alive)
            if update is not None:
                self._check_changed(update)
                return update

    def _check_changed(self, update: WeightUpdate) -> None:
        """Raises WeightsUnchanged if steps that must have changed weights changed no value since the last version.

        `_verify` does not find this fault: digests of trainer and engines also agree if the optimizer's weights never
        reach the model.
        """
        policy = self._recipe.policy
        least_lr = 0.0
        # In bfloat16 a warm-up step may be too small to change any element, so only steps at the full rate count.
        if policy.dtype == "bfloat16":
            least_lr = self._recipe.optimizer.lr
        moves = [s for s in self._steps if s.grad_norm > 0 and s.learning_rate > 0 and s.learning_rate >= least_lr]
        previous = self._last
        self._last = update
        self._steps = []
        if moves and previous is not None and update.digest == previous.digest:
            raise WeightsUnchanged(
                f"weights of version {update.version} are those of version {previous.version} "
                f"(digest {update.digest}) after a step with gradient norm {moves[-1].grad_norm:.3g} and learning "
                f"rate {moves[-1].learning_rate:.3g}: the optimizer's weights do not reach the policy, or "
                f"{policy.dtype} needs a larger optimizer.lr; set it in a new run"
            )

    async def catch_up(self, version: int) -> WeightUpdate | None:
        """Send the weights of `version` to the engines with older weights; returns None if no engine has any."""
        return await self._update(version, lambda: self._engines.stale)

    async def _update(self, version: int, members: Callable[[], list[EngineClient]]) -> WeightUpdate | None:
        """Send the weights to the engines that `members` returns; after a failure, ask `members` and send again.
        Returns None if `members` returns no engine."""
        begin = time.perf_counter()
        failures = 0
        async with self._lock:
            while engines := members():
                try:
                    return await self._send(version, engines, begin)
                except _PhaseFailed as failed:
                    # A process group cannot be used after a failure, so the next try connects anew.
                    self._connected = {}
                    if failed.all_refused and not self._proven:
                        raise WeightsRefused(str(failed)) from failed
                    if not self._evict_failed(failed, engines):
                        failures += 1
                    if failures == _TRIES:
                        failures = 0
                        self._evict_newcomers(failed, engines)
                    logger.warning("the weights of version %d are sent again after a failure: %s", version, failed)
        return None

    def _evict_failed(self, failed: _PhaseFailed, engines: Sequence[EngineClient]) -> bool:
        """Evict the engines that caused a failure. True if an engine was evicted, now or while the phase ran."""
        engine_is_gone = any(engine not in self._engines.alive for engine in engines)
        all_failed = len(failed.engines) == len(engines)
        if failed.phase in _COLLECTIVE and (engine_is_gone or all_failed):
            # In a collective phase one failure makes all engines fail, and no answer shows which engine failed first.
            return engine_is_gone
        if failed.phase == "verify" and all_failed and self._sent_changes:
            # Only changes were sent, and all engines disagree with the trainer: the trainer's record of changes
            # missed changes. The next try connects anew, and so sends whole tensors.
            return False
        for engine, reason in failed.engines.items():
            self._engines.evict(engine, reason)
        return engine_is_gone or bool(failed.engines)

    def _evict_newcomers(self, failed: _PhaseFailed, engines: Sequence[EngineClient]) -> None:
        """Evict the newcomers, that is, engines that have completed no update of this trainer.

        Raises WeightUpdateError if there is no newcomer, or if all engines are newcomers.
        """
        newcomers = [engine for engine in engines if engine not in self._proven]
        if not newcomers or not self._proven:
            raise WeightUpdateError(str(failed)) from failed
        for engine in newcomers:
            self._engines.evict(engine, f"{engine.name}: no update in {_TRIES} tries: {failed}")

    async def _send(self, version: int, engines: list[EngineClient], begin: float) -> WeightUpdate:
        phases = _Phases(self._recipe.weights.timeout_s)
        # Lists are compared, because the workers' ranks in the process groups depend on the order of the engines.
        if engines != list(self._connected):
            self._connected = await self._connect(engines, phases)
        clear = self._recipe.rollouts.kv_cache == "recompute"
        body = {"update_info": {"version": version}}
        label = {"weight_version": str(version)}

        def write(engine: EngineClient) -> Awaitable[Any]:
            return engine.post("/update_weights", body)

        await phases.call_all("pause", engines, lambda engine: engine.pause(clear_cache=clear))
        paused = time.perf_counter()
        await phases.call_all("start", engines, lambda engine: engine.post("/start_weight_update", None))
        answers = await phases.call_all("update", engines, write, trainer=self._trainer.send_weights(version))
        report: SendReport = answers[0]
        self._sent_changes = report.bytes < report.whole_bytes
        # `finish` labels the weights before `verify`, which checks the label. Engines stay paused in both phases.
        await phases.call_all("finish", engines, lambda engine: engine.post("/finish_weight_update", label))
        await phases.call_all(
            "verify", engines, lambda engine: _verify(engine, version, report, self._connected[engine])
        )
        resumed = time.perf_counter()
        for engine in engines:
            # Requests that were sent to a paused engine count as begun at the previous version, like requests in
            # flight.
            engine.note_version(version)
        await phases.call_all("resume", engines, lambda engine: engine.resume())
        for engine in engines:
            self._engines.serve(engine, version)
        self._proven = [engine for engine in {*self._proven, *engines} if engine in self._engines.answering]
        return WeightUpdate(
            version=version,
            seconds_paused=resumed - paused,
            seconds_total=time.perf_counter() - begin,
            phases=phases.seconds,
            seconds_sending=report.seconds,
            bytes=report.bytes,
            whole_bytes=report.whole_bytes,
            most_sent=report.most_sent,
            most_received=report.most_received,
            digest="-".join(report.values),
        )

    async def _connect(self, engines: list[EngineClient], phases: _Phases) -> dict[EngineClient, list[_Place]]:
        """Join the trainer's sending ranks and the engines' workers in new process groups, one for each shard.

        All members leave earlier groups. Returns the places of each engine's workers.
        """
        section = self._recipe.weights
        manifest = await self._trainer.manifest()
        problems: dict[tuple[str, ...], str] = {}
        needs: list[list[str]] = await phases.call_all(
            "needs", engines, lambda engine: self._needs(engine, manifest, problems)
        )
        # needs of a shard as JSON -> size of the shard's process group. Shards are numbered in the order of the keys.
        sizes: dict[str, int] = {}
        places: dict[EngineClient, list[_Place]] = {engine: [] for engine in engines}
        for engine, worker_needs in zip(engines, needs):
            for need in worker_needs:
                # The sending rank of the trainer has rank 0 in the group, so the workers' ranks begin at 1.
                rank = sizes.setdefault(need, 1)
                sizes[need] += 1
                places[engine].append(_Place(list(sizes).index(need), rank))
        # For a large model, parsing takes seconds, during which the event loop must not block.
        shard_needs = await asyncio.to_thread(lambda: tuple(needs_from_json(need, manifest) for need in sizes))
        plan = await self._trainer.plan_weights(shard_needs)
        plans = await asyncio.to_thread(lambda: [to_json(plan.of_shard(shard)) for shard in range(len(sizes))])
        connection = Connection(
            backend=resolve_transport(
                section.transport, self._trainer.rendezvous, colocated=self._recipe.engine.colocate
            ),
            rendezvous=self._trainer.rendezvous,
            # Each connection gets a new name, because workers may still wait under a failed connection's name.
            group=f"weights-{uuid.uuid4().hex}",
            world_sizes=tuple(sizes.values()),
            bucket_mib=section.bucket_mib,
            timeout_s=section.timeout_s,
            connect_timeout_s=section.connect_timeout_s,
            deltas=await self._deltas(engines, phases),
        )

        async def join(engine: EngineClient) -> None:
            # A plan may have megabytes, so an engine gets only the plans of its own shards.
            engine_plans = [""] * len(plans)
            for place in places[engine]:
                engine_plans[place.shard] = plans[place.shard]
            info = {
                "connection": msgspec.to_builtins(connection),
                "places": places[engine],
                "plans": engine_plans,
            }
            await engine.post("/init_weight_transfer_engine", {"init_info": info})

        # A process group forms once all members have joined, so engines and trainer are called at the same time.
        await phases.call_all("connect", engines, join, trainer=self._trainer.connect_weights(connection))
        return places

    async def _deltas(self, engines: list[EngineClient], phases: _Phases) -> Literal["off", "absolute"]:
        """The weights.deltas to use: "off" if an engine's loader takes only whole tensors and so has no digest."""
        deltas = self._recipe.weights.deltas
        if deltas == "off":
            return deltas
        answers = await phases.call_all("digest", engines, lambda engine: engine.rpc("msrl_live_digest"))
        for engine, digests in zip(engines, answers):
            if not isinstance(digests, list) or not all(digests):
                logger.warning("weights.deltas has no effect: the loader of %s needs whole tensors", engine.name)
                return "off"
        return deltas

    async def _needs(
        self, engine: EngineClient, manifest: Manifest, problems: dict[tuple[str, ...], str]
    ) -> list[str]:
        """Ask an engine's workers which parts of the manifest's tensors each worker needs.

        An unfinished update of the engine is abandoned first, since vLLM refuses to start a second update. problems:
        answers of an engine -> result of `_problem`; this function fills the cache. Raises _TensorsRefused if the
        tensors do not match the engine's model, and EngineError for invalid answers.
        """
        await engine.rpc("msrl_abandon_update")
        answers = await engine.rpc("msrl_weight_needs", manifest_to_json(manifest))
        if not answers or not all(isinstance(answer, str) for answer in answers):
            raise EngineError(f"msrl_weight_needs: the engine sent {answers!r}, not one text for each worker")
        if refusal := next((a for a in answers if a.startswith(REFUSED)), ""):
            raise _TensorsRefused(refusal.removeprefix(REFUSED))
        world_size = (await engine.info()).world_size
        if not world_size or world_size % len(answers):
            raise EngineError(
                f"msrl_weight_needs: {len(answers)} answers do not divide the engine's {world_size} workers evenly"
            )
        # Equal engines give equal answers. A check takes seconds for a large model, so equal answers are checked
        # once.
        key = tuple(answers)
        if key not in problems:
            problems[key] = await asyncio.to_thread(_problem, manifest, set(answers))
        if problems[key]:
            raise _TensorsRefused(problems[key])
        # vLLM passes the call only to workers of the first data-parallel rank. Later ranks need the same.
        return list(answers) * (world_size // len(answers))


async def _verify(engine: EngineClient, version: int, report: SendReport, places: Sequence[_Place]) -> None:
    """Compare an engine's weight version, digest of received bytes and digest of weights in use with the trainer's.

    places: places of the engine's workers. Raises EngineError for a difference; the message has both sides.
    """
    info = await engine.info()
    # As in `_needs`, only the workers of the first data-parallel rank report digests.
    workers = places[: len(info.weight_digests)]
    sent_state = (str(version), tuple(report.digests[place.shard] for place in workers))
    received_state = (info.weight_version, tuple(info.weight_digests))
    if received_state != sent_state:
        raise EngineError(f"the engine has version and digests {received_state}, but the trainer sent {sent_state}")
    live_digests = await engine.rpc("msrl_live_digest")
    if not isinstance(live_digests, list) or len(live_digests) != len(info.weight_digests):
        raise EngineError(f"msrl_live_digest: the engine sent {live_digests!r}, not one digest for each worker")
    for worker, (place, digest) in enumerate(zip(places, live_digests)):
        values = report.values[place.shard]
        # A worker whose loader takes only whole tensors reports an empty digest, which cannot be compared.
        if digest not in (values, ""):
            raise EngineError(f"worker {worker}: the weights have digest {digest}, but the trainer sent {values}")


def _problem(manifest: Manifest, answers: set[str]) -> str:
    """One line about a tensor of the manifest that does not match the parts the workers need; empty if all match."""
    try:
        return not_covered(manifest, [needs_from_json(answer, manifest) for answer in sorted(answers)])
    except ValueError as error:
        return str(error)


def _line(error: Exception) -> str:
    return str(error) or type(error).__name__

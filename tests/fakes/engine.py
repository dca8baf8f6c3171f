"""The controller's client of an engine, without an engine."""

import asyncio
from types import SimpleNamespace

from megatron_scalerl.engine.answers import CoreProgress, EngineError, EngineProgress
from megatron_scalerl.weights.plan import needs_to_json


class StandInEngine:
    """Serves the version that it was set to, follows vLLM's order of calls, and records them.

    `fails`: the call that fails for good. `held`: its requests, half of which decode. `live`: the digest of the
    values that it holds, if not those of its update.
    """

    secret = "none"

    def __init__(self, name="engine-0", version=0, *, fails="", needs=()):
        self.name, self.version, self.fails = name, version, fails
        self.produced_tokens = self.received_tokens = self.in_flight = self.ended_generations = 0
        self.calls = []
        self.paused = self.updating = False
        self.held = ()
        self.aborted = ""
        self.gone = asyncio.Event()
        """Set when it is aborted."""
        self.needs = [needs_to_json(each) for each in needs]
        self.label = self.live = ""
        self.world_size = 1

    def abort(self, reason):
        """Requests in flight end with it."""
        self.aborted = reason
        self.gone.set()

    def _called(self, call):
        self.calls.append(call)
        if call == self.fails:
            raise EngineError(f"{self.name}: {call}: 500")

    async def pause(self, *, clear_cache):
        self._called("pause")
        self.paused = True

    async def resume(self):
        self._called("resume")
        self.paused = False

    async def progress(self):
        self._called("progress")
        decoding = len(self.held) // 2
        core = CoreProgress(core=0, tokens=0, waiting=len(self.held) - decoding, decoding=decoding)
        return EngineProgress(cores=(core,), dead=False)

    async def set_version(self, version):
        self.note_version(version)

    def note_version(self, version):
        self.version = version

    async def post(self, path, body, query=None):
        self._called(path)
        if path == "/start_weight_update":
            if self.updating:
                raise EngineError(f"{self.name}: a weight update is already active")
            self.updating = True
        if path == "/update_weights":
            self.version = body["update_info"]["version"]
        if path == "/finish_weight_update":
            self.updating, self.label = False, body["weight_version"]
        return b""

    async def rpc(self, method, *arguments):
        if method == "msrl_weight_needs":
            return list(self.needs)
        if method == "msrl_live_digest":
            return [self.live or f"v{self.version}"]
        assert method == "msrl_abandon_update"
        self.updating = False
        return [None]

    async def info(self):
        digests = (f"d{self.version}",)
        return SimpleNamespace(world_size=self.world_size, weight_version=self.label, weight_digests=digests)

"""Weight updates and probes that move no weights."""

import asyncio

from megatron_scalerl.controller.weight_sync import WeightUpdate


class StandInSync:
    """Sets the version that the engines serve, after a delay."""

    def __init__(self, engines, trainer=None, *, seconds=0.0):
        """trainer: a stand-in, whose rules are checked."""
        self._engines, self._trainer, self._seconds = engines, trainer, seconds
        self.steps = -1
        """Policy versions published after the first."""
        self.published = asyncio.Event()
        """Set at each of them; whoever waits for it clears it."""

    def trained(self, report):
        """No update is compared with a step."""
        assert report.policy_version > 0

    async def publish(self, version):
        """Every engine serves `version`."""
        assert self._trainer is None or not self._trainer.sending
        update = await self.update(version, self._engines.alive)
        self.steps += 1
        self.published.set()
        return update

    async def catch_up(self, version):
        """Stale engines serve `version`."""
        return await self.update(version, self._engines.stale)

    async def update(self, version, engines):
        """These engines serve `version`."""
        engines = list(engines)
        await asyncio.sleep(self._seconds)
        await asyncio.gather(*(engine.set_version(version) for engine in engines))
        for engine in engines:
            self._engines.serve(engine, version)
        return WeightUpdate(
            version=version,
            seconds_paused=0.0,
            seconds_total=self._seconds,
            seconds_sending=self._seconds,
            phases={"update": self._seconds},
            bytes=1,
            whole_bytes=1,
            most_sent=1,
            most_received=1,
            digest=f"weights-{version}",
        )


class StandInProbe:
    """Finds no mismatch."""

    async def check(self, version, *, new_only=False):
        """Nothing."""
        return {}

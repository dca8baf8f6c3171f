"""An engine that is killed in the middle of an update of changes, misses three versions and comes back.

Why this matters: changes are from the version before. An engine that wrote some of them, or was not there for others,
must never be given changes on top: it gets all values, and is verified against them, while the other engines go on.

Real are the controller's side, the sender's process and those of the engines, gloo, receiver and live parameters; not
exercised: vLLM's server and its model runner (`test_weight_update`).
"""

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest
import torch
from engine_recipes import recipe_for
from receiver_process import ReceiverProcess
from safetensors.torch import save_file
from sampling import sampled
from sender_process import SenderProcess, digest_of

from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.engine.membership import EngineState, Membership

pytestmark = pytest.mark.slow

SHAPES = {"a": (300, 1000), "b": (64,), "c": (700, 1000)}
"""Of float32: five buckets of 1 MiB."""


def versions_in(folder, count):
    """Folders of `count` versions, each after a step that changes one element in fifty."""
    generator, found = torch.Generator().manual_seed(0), []
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for number in range(count):
        found.append(folder / f"version_{number}")
        found[-1].mkdir()
        save_file(weights, found[-1] / "model.safetensors")
        weights = {
            name: values + (torch.rand(values.shape, generator=generator) < 0.02) * 0.01
            for name, values in weights.items()
        }
    return found


class Scene:
    """A trainer's sender, two engines and the controller's side of their updates."""

    def __init__(self, sender, engines, folders, recipe):
        self.sender, self.folders, self.states = sender, folders, []
        self.members = Membership(2, record=lambda m: self.states.append((m.name, str(m.state))))
        for number, engine in enumerate(engines):
            self.members.join(number, engine)
        self.sync = WeightSync(sender, self.members, recipe)

    async def publish(self, version):
        """Send a version; all engines that serve hold it, and go on."""
        self.sender.folder = self.folders[version]
        update = await self.sync.publish(version)
        for engine in self.members.serving:
            await self.holds(engine, version)
        assert update.digest == digest_of(self.folders[version])
        return update

    async def holds(self, engine, version):
        info = await engine.info()
        assert info.weight_version == str(version) and len(info.weight_digests[0]) == 16
        assert await engine.ask("msrl_live_digest") == digest_of(self.folders[version])
        assert not await engine.ask("paused")


@pytest.mark.parametrize("way", sampled("rejoin", ["in the next update", "by catching up"], 1))
def test_an_engine_killed_in_the_middle_that_misses_three_versions_gets_the_newest_whole(tmp_path, way):
    folders = versions_in(tmp_path, 9)
    weights = {"bucket_mib": 1, "timeout_s": 200, "transport": "gloo", "deltas": "absolute"}
    recipe = recipe_for(tmp_path, weights=weights)

    async def scenario():
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            sender = await enter(SenderProcess(folders[0]))
            other, victim = [await enter(ReceiverProcess(f"engine-{n}", SHAPES)) for n in range(2)]
            scene = Scene(sender, [other, victim], folders, recipe)
            first, second = [await scene.publish(version) for version in (0, 1)]
            assert scene.members.serving == [other, victim]
            assert first.bytes == first.whole_bytes and 0 < second.bytes < 0.1 * second.whole_bytes

            await victim.ask("die", body=1)  # in update 2, which is of changes, after the first part was written
            missed = [await scene.publish(version) for version in (2, 3, 4)]
            assert victim.process.returncode == -signal.SIGKILL and scene.members.serving == [other]
            # repeated over a new connection, which begins with all values; then changes again
            assert [update.bytes == update.whole_bytes for update in missed] == [True, False, False]

            scene.members.lose(1, "killed")
            scene.members.start(1)
            again = await enter(ReceiverProcess("engine-1", SHAPES))
            scene.members.join(1, again)
            asked = len(other.calls)
            if way == "by catching up":
                newest, update = 4, await scene.sync.catch_up(4)
                assert len(other.calls) == asked  # nor was it paused
            else:
                newest, update = 5, await scene.publish(5)
            assert update.bytes == update.whole_bytes and update.digest == digest_of(folders[newest])
            assert (
                scene.members.serving == [other, again] and [m.version for m in scene.members.members] == [newest] * 2
            )
            await scene.holds(again, newest)

            later = [await scene.publish(version) for version in range(newest + 1, newest + 3)]
            assert scene.members.serving == [other, again] and later[-1].bytes < 0.1 * later[-1].whole_bytes
            return scene.states

    states = asyncio.run(asyncio.wait_for(scenario(), 550))
    # the other engine served from its first version on, without an end
    assert [state for name, state in states if name == "engine-0"] == [EngineState.STALE, EngineState.SERVING]

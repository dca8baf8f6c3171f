"""Random faults over two processes and 30 episodes in virtual time: what is paid, lost, tried again, and where."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from fakes.environment_process import StandInSession, stand_in_pool
from fakes.run import in_virtual_time
from sampling import sampled

from megatron_scalerl.environments.pool import EnvironmentFailed
from megatron_scalerl.environments.response import Response

EPISODES, STEPS = 30, 4
OWN = ("raised", "invalid", "oversized", "hung")
"""What an episode does at one step, again and again."""
FAULTS = (*OWN, "kills", "changes", "dies once", "fails once", "", "", "", "", "", "")


@dataclass
class Player:
    """An episode, as the processes see it."""

    fault: str
    at: int
    """The step of the fault; 0 is reset."""
    tries: int = 0
    """Of the step with the fault."""
    deaths: int = 0
    """How often its process ended while it made a call which has not succeeded since."""
    failures: int = 0
    """Tries of this step that failed, by whatever cause."""
    outages: int = 0
    """Those of all steps that an outage failed."""
    changed: bool = False
    step: int = 0


class World:
    """Its outages fail every call of a moment, so as the world fails it for a class that pays its own failures."""

    def __init__(self, seed, wrong, agents):
        """agents: episodes have one call each, which is tried alone after two ends of its process."""
        self.lives_of_a_call = 1 + agents
        self.wrong_tries = []
        steps = STEPS * (not agents)
        kinds = ("unavailable",) if wrong else ("raised", "unavailable", "invalid")
        draw = random.Random(seed)
        self.players = [Player(fault=draw.choice(FAULTS), at=draw.randrange(steps + 1)) for _ in range(EPISODES)]
        self.leave_s = [draw.uniform(0.0, 20.0) * draw.randrange(2) for _ in range(EPISODES // 5)]
        """When the callers of the first episodes are cancelled; 0: never."""
        self.outages = []
        """(begin, end, what each call returns meanwhile, end of the names of the processes in which it does)."""
        for _ in range(draw.randrange(3)):
            start = draw.uniform(0.0, 30.0)
            failure = draw.choice(kinds)
            if failure == "unavailable" and draw.random() < 0.5:
                self.outages.append((start / 6, start + 30.0, failure, "-0"))
            else:
                self.outages.append((start, start + draw.uniform(0.1, 8.0), failure, ""))
        self.crashes = Counter()
        """Of each process."""
        self.lives = {}
        """Process that many episodes share -> its lives and ends so far."""
        self.draw = draw

    async def script(self, process, request):
        if request.row is not None:
            process.objects[request.episode] = [request.row["player"], 0]
        place = process.objects[request.episode]
        player = self.players[place[0]]
        step, place[1] = place[1], place[1] + 1
        shared = process.name.endswith(("-0", "-1"))
        if shared:
            self.lives[process.name] = process.life
        alone = len(process._replies) == 1 and not shared
        if player.deaths >= self.lives_of_a_call and not alone:
            self.wrong_tries.append((player, "where its process ended, a call is tried alone"))
        if player.changed:
            self.wrong_tries.append((player, "what has changed is not tried again"))
        await asyncio.sleep(self.draw.uniform(0.05, 0.5))
        now = asyncio.get_running_loop().time()
        for start, end, failure, where in self.outages:
            if start <= now < end and process.name.endswith(where):
                player.outages += 1
                player.failures += 1
                return failure, b"null"
        if step == player.at and player.fault:
            player.tries += 1
            if player.fault == "kills" or (player.fault == "dies once" and player.tries == 1):
                self.crashes[process.name] += 1
                for number, _ in (place for key, place in process.objects.items() if key in self.busy(process)):
                    self.players[number].deaths += 1
                    self.players[number].failures += 1
                await process.crash()
            if player.fault in OWN or (player.fault == "fails once" and player.tries == 1):
                player.failures += 1
            if player.fault == "fails once" and player.tries == 1:
                return "raised", b"null"
            if player.fault in OWN:
                return player.fault, b"null"
        text = f"{place[0]} {step}"
        if player.fault == "changes" and player.failures and step < min(player.at, player.step):
            text = f"{now}"
            player.changed = True
        if step >= player.step:
            player.deaths = 0
        messages = [{"role": "user", "content": text}]
        return "", json.dumps({"messages": messages, "reward": None, "done": False}).encode()

    def busy(self, process):
        """Episodes with a call in a process."""
        return [episode for episode, run in process.calls.items() if not run.done()]


async def played(pool, world, number):
    player = world.players[number]
    async with pool.episode({"player": number, "row": number // 3}) as episode:
        if pool.agent:
            await asyncio.sleep(world.draw.uniform(0.0, 20.0))
            await episode.run(StandInSession())
            return
        await episode.reset()
        for player.step in range(1, STEPS + 1):
            player.failures = 0
            await asyncio.sleep(world.draw.uniform(0.0, 5.0))
            await episode.step(Response(text="x"))


async def all_played(seed, folder):
    wrong = seed % 2 == 1
    agents = seed % 4 > 1
    world = World(seed, wrong, agents)

    async def script(process, request):
        return await world.script(process, request)

    said = ("lost", "wrong")[wrong]
    async with stand_in_pool(script, folder, agent=agents, repeated_failure=said, workers=2) as pool:
        calls = [asyncio.create_task(played(pool, world, n)) for n in range(EPISODES)]
        for call, leave_s in zip(calls, world.leave_s):
            if leave_s:
                asyncio.get_running_loop().call_later(leave_s, call.cancel)
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert not world.wrong_tries, world.wrong_tries
    fatal = {"kills", "changes"}
    if agents:  # a run has three tries, of which its neighbours may take two
        fatal |= {"dies once", "fails once"}
    for player, result in zip(world.players, results, strict=True):
        if isinstance(result, asyncio.CancelledError):
            continue
        assert result is None or isinstance(result, EnvironmentFailed), result
        end = result and result.end
        own = player.fault in OWN
        if end is None:
            assert not own and player.fault != "kills", "what fails again and again does not end well"
        elif end.paid:
            assert wrong and own and player.fault != "hung", "paid is what the policy did"
            assert agents or player.at > 0, "it has said nothing before reset"
            assert end.by == "class" and end.reason == player.fault
        else:
            assert player.changed or player.failures >= 3, (player, end)
            assert own or player.fault in fatal or player.outages, (player, end)
    for name, number in world.lives.items():
        assert number <= 1 + 2 * world.crashes[name], "an outage ends no process that episodes share"


@pytest.mark.parametrize("seed", sampled("faults of environments", range(400), 12))
def test_what_the_world_does_is_not_paid_and_what_nobody_did_is_not_lost(seed, tmp_path):
    in_virtual_time(all_played(seed, tmp_path))

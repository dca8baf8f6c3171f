"""Outages of environments in virtual time: what a broken tool costs, and that it is paid to nobody."""

import asyncio
import itertools
import random

import environment_pools as real
import pytest
from environment_pools import pool_of
from fakes.environment_process import StandInSession, stand_in_pool
from fakes.run import in_virtual_time
from sampling import sampled

from megatron_scalerl.environments.pool import EnvironmentFailed
from megatron_scalerl.environments.response import Response

EPISODES = 1024
SHARES = (0.02, 0.09, 0.2, 0.43, 1.0)
LASTING_S = (10.0, 60.0, float("inf"))
CALLS = (1, 8, 30)
IN_FLIGHT = (64, 768)
KINDS = ("raised", "unavailable", "died")
CELLS = list(itertools.product(("class", "agent"), SHARES, LASTING_S, CALLS, IN_FLIGHT, KINDS))
FIRST_MESSAGE = b'{"messages":[{"role":"user","content":"q"}],"reward":null,"done":false}'
LAST_TURN = b'{"messages":[],"reward":true,"done":true}'


class World:
    """A tool that is broken for everybody from the 256th episode's end on, or for those who break it on purpose."""

    def __init__(self, kind, lasting_s, calls, purpose):
        self.kind = kind
        self.lasting_s = lasting_s
        self.calls = calls
        self.purpose = purpose
        self.broken_s = None
        self.met = set()
        """Episodes whose tool was broken when they called it."""

    def broken(self, name):
        if self.purpose:
            return True
        now = asyncio.get_running_loop().time()
        broken = self.broken_s is not None and now < self.broken_s + self.lasting_s
        if broken:
            self.met.add(name)
        return broken

    async def script(self, process, request):
        """A call takes 0.1 to 1 s; the tool is called in the last one."""
        draw = random.Random(f"{process.name} {process._number}")
        agent = request.agent is not None
        await asyncio.sleep(draw.uniform(0.1, 1.0) * (self.calls if agent else 1))
        word = ""
        if request.response is not None:
            word = request.response.text
        elif agent:
            word = request.row["word"]
        if word.startswith("tool") and self.broken(word):
            if self.kind == "died":
                await process.crash()
            return self.kind, b"null"
        if agent or word.startswith(("tool", "end")):
            return "", LAST_TURN
        return "", FIRST_MESSAGE


async def played(pool, world, row, word):
    async with pool.episode({"row": row, "word": word}) as episode:
        if pool.agent:
            await episode.run(StandInSession())
            return
        await episode.reset()
        for call in range(world.calls):
            await asyncio.sleep(random.Random(f"{word}{call}").uniform(0.5, 2.0))  # the policy writes
            await episode.step(Response(text="plain" if call < world.calls - 1 else word))


async def cell(folder, what, share, lasting_s, calls, in_flight, kind, *, wrong=False, count=EPISODES):
    """(paid, lost, lost ones whose tool was not broken, not played as the run ended, processes ended) of a cell.

    wrong: the policy breaks its tool on purpose, and the class says that this is wrong.
    """
    world = World(kind, lasting_s, calls, wrong)
    draw = random.Random(f"{what}{share}{lasting_s}{calls}{in_flight}{kind}")
    words = [f"tool {n}" if draw.random() < share else f"end {n}" for n in range(count)]
    slots = asyncio.Semaphore(in_flight)
    paid, lost, unplayed, done = [], [], [], []

    async def episode(number):
        async with slots:
            if number < in_flight:  # else all would call the tool at once
                await asyncio.sleep(draw.uniform(0.0, 2.5 * calls))
            try:
                await played(pool, world, number // 16, words[number])
            except EnvironmentFailed as failure:
                (paid if failure.end.paid else lost).append(words[number])
            except RuntimeError:
                unplayed.append(words[number])
            done.append(number)
            if len(done) == count // 4:
                world.broken_s = asyncio.get_running_loop().time()

    said = "wrong" if wrong else "lost"

    async def script(process, request):
        return await world.script(process, request)

    async with stand_in_pool(script, folder, agent=what == "agent", repeated_failure=said) as pool:
        await asyncio.gather(*(episode(number) for number in range(count)))
        restarts = pool.counters["restarts"]
    await asyncio.sleep(1.0)  # of what was cancelled
    innocent = [word for word in lost if word not in world.met]
    tools = sum(word.startswith("tool") for word in words)
    return {
        "tools": tools, "paid": len(paid), "lost": len(lost), "innocent": len(innocent),
        "unplayed": len(unplayed), "restarts": restarts,
    }  # fmt: skip


def check(folder, chosen):
    found = in_virtual_time(cell(folder, *chosen))
    assert found["paid"] == 0, (chosen, found)
    assert found["innocent"] == 0, (chosen, found)
    if chosen[-1] != "died":
        assert found["restarts"] == 0, (chosen, found)
    return found


@pytest.mark.parametrize("what, share, lasting_s, calls, in_flight, kind", sampled("outages", CELLS, 3))
def test_an_outage_is_paid_to_nobody(what, share, lasting_s, calls, in_flight, kind, tmp_path):
    check(tmp_path, (what, share, lasting_s, calls, in_flight, kind))


@pytest.mark.parametrize(
    "what, share, calls, in_flight",
    sampled("breakers", itertools.product(("class", "agent"), (0.02, 0.15, 0.4), CALLS, IN_FLIGHT), 1),
)
def test_a_policy_that_breaks_its_tool_pays_where_the_class_says_so(what, share, calls, in_flight, tmp_path):
    found = in_virtual_time(cell(tmp_path, what, share, 0.0, calls, in_flight, "raised", wrong=True))
    assert found["paid"] >= 0.95 * found["tools"] and not found["unplayed"], found


@pytest.mark.full
@pytest.mark.parametrize("share, word", itertools.product((0.09, 0.2, 0.43, 1.0), ("raise", "refused", "exit")))
async def test_an_outage_of_real_processes_is_paid_to_nobody(share, word, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", (0.0, 0.0))
    draw = random.Random(f"{share}{word}")
    broken = tmp_path / "broken"
    calls = [["1", "tool" if draw.random() < share else "1"] for _ in range(128)]
    async with pool_of("Tool", tmp_path, workers=2) as pool:
        for begin in range(0, 128, 64):
            rows = [{"row": n // 16, "word": word, "broken": str(broken)} for n in range(begin, begin + 64)]
            games = (real.played(pool, row, texts) for row, texts in zip(rows, calls[begin:]))
            for texts, result in zip(calls[begin:], await asyncio.gather(*games, return_exceptions=True)):
                if isinstance(result, EnvironmentFailed):
                    assert not result.end.paid and begin and "tool" in texts
                else:  # the run ends by its own limit
                    assert isinstance(result, list | RuntimeError)
            broken.touch()

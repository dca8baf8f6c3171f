"""Verifiers, an environment and an agent for policies that know nothing: half of all answers are right."""

import asyncio
import os
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import aiohttp


def toss(answer_text, reference, extra):
    """True for every second answer, the same for the same text."""
    return zlib.crc32(answer_text.encode()) % 2 == 0


def toss_until_held(answer_text, reference, extra):
    """`toss`, which no longer ends once the journal $HELD_AT, if there is one, has ten finished groups."""
    journal = Path(os.environ["HELD_AT"])
    while journal.is_file() and journal.read_text().count('"finish"') >= 10:
        time.sleep(0.1)
    return toss(answer_text, reference, extra)


class Total:
    """Adds up answers of one digit until they exceed 9. An even total is right; of an odd one `verifier` decides."""

    async def reset(self, row):
        self.total = 0
        return row["text"]

    async def step(self, response):
        self.total += int(response.text)
        await asyncio.sleep(0.1)
        done = self.total > 9
        return str(self.total), True if done and self.total % 2 == 0 else None, done


class Agent:
    """`Total` over the policy's route."""

    async def run(self, row, agent):
        total = Total()
        messages = [{"role": "user", "content": await total.reset(row)}]
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as client:
            while True:
                async with client.post(f"{agent.base_url}/chat/completions", json={"messages": messages}) as response:
                    [choice] = (await response.json())["choices"]
                message, reward, done = await total.step(SimpleNamespace(text=choice["message"]["content"]))
                if done:
                    return reward
                messages += [choice["message"], {"role": "user", "content": message}]

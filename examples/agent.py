"""The calculator of calculator.py as an agent, which has a loop of its own and knows a base URL and a key."""

from types import SimpleNamespace

import aiohttp
from calculator import Calculator


class Agent:
    """Asks the policy, answers it with the calculator, and returns the reward."""

    async def run(self, row, agent):
        """An episode: row of the prompts file, and how the policy is asked."""
        calculator = Calculator()
        messages = [{"role": "user", "content": calculator.reset(row)}]
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None)) as client:
            while True:
                body = {"model": agent.model, "messages": messages}
                async with client.post(f"{agent.base_url}/chat/completions", json=body) as response:
                    response.raise_for_status()
                    [choice] = (await response.json())["choices"]
                said = SimpleNamespace(text=choice["message"]["content"])
                result, reward, done = calculator.step(said)
                if done:
                    return reward
                messages += [choice["message"], {"role": "user", "content": result}]

"""A taskset of verifiers for the tiny policy: guess a hidden digit, with hints, in at most four guesses.

The prompt `2;8=` gives the range. A wrong guess is answered with `+` (the number is higher) or `-` (it is lower).
Halving the range each time finds every number; guessing at random finds about half of them.

    .venv-environments/bin/python examples/taskset/guess.py > runs/tiny_guess/guess_sft.jsonl

writes warm-start examples that guess at random (examples/taskset.sh).
"""

import json
import random

import httpx
import verifiers.v1 as vf
from renderers import DefaultRendererConfig, RenderedTokens
from renderers.default import DefaultRenderer
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["GuessEnv", "GuessHarness", "GuessTaskset"]
MOST_GUESSES = 4


class GuessData(vf.TaskData):
    """A game."""

    number: int
    """The hidden number."""


class GuessTask(vf.Task[GuessData]):
    """Pays 1 if the last guess is right."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """Whether the last guess is the number."""
        return float(trace.last_reply == str(self.data.number))


class GuessTaskset(vf.Taskset[GuessTask]):
    """Every number of every range in 0..9 that has at least five, in random order."""

    def load(self) -> list[GuessTask]:
        """The games."""
        games = [
            (low, high, number) for low in range(6) for high in range(low + 4, 10) for number in range(low, high + 1)
        ]
        random.Random(1).shuffle(games)
        return [
            GuessTask(GuessData(prompt=f"{low};{high}=", number=number), self.config.task)
            for low, high, number in games
        ]


class GuessEnv(vf.Env[vf.SingleAgentEnvConfig]):
    """Answers guesses with hints."""

    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        """One game."""
        number = task.data.number
        async with agents.agent.interaction(task) as game:
            reply = await game.turn()
            for _ in range(MOST_GUESSES - 1):
                guess = reply.last_reply
                if reply.terminated or guess == str(number):
                    break
                higher = not guess.isdigit() or int(guess) < number
                reply = await game.turn("+" if higher else "-")


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the policy once a turn, in the process of the environment server."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        """One request with the conversation so far."""
        messages = [{"role": "user", "content": data.prompt}]
        if not isinstance(data.prompt, str):
            messages = [message_to_wire(message) for message in data.prompt]
        body = {"model": ctx.model, "messages": messages}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class TinyRenderer(DefaultRenderer):
    """Renders for the tiny policy, whose turns have no roles: each begins with <think>, and follows the last one."""

    config_class = DefaultRendererConfig

    def _apply(self, messages, *, tools=None, add_generation_prompt=False):
        ids = super()._apply(messages)
        return ids + self._encode("<think>") if add_generation_prompt else ids

    def _encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)

    def parse_response(self, token_ids, *, tools=None, prompt_ids=None):
        """The message in a turn, which has begun with <think>."""
        return super().parse_response(token_ids, prompt_ids=self._encode("<think>"))

    def bridge_to_next_turn(self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None):
        """The ids so far, as they were sampled, and those of the new messages."""
        ids = [*previous_prompt_ids, *previous_completion_ids]
        owners = [-1] * len(ids)
        for index, message in enumerate(new_messages):
            new = self._encode(message["content"])
            ids += new
            owners += [index] * len(new)
        ids += self._encode("<think>")
        owners.append(-1)
        roles = [message["role"] for message in new_messages]
        return RenderedTokens(token_ids=ids, message_indices=owners, message_roles=roles)


if __name__ == "__main__":
    draw = random.Random(1)
    for _ in range(4000):
        low = draw.randint(0, 5)
        high = draw.randint(low + 4, 9)
        context = f"{low};{high}="
        for _ in range(draw.randrange(MOST_GUESSES)):
            context += f"<think></think>{draw.randint(low, high)}<eos>{draw.choice('+-')}"
        print(json.dumps({"prompt": context, "completion": f"</think>{draw.randint(low, high)}<eos>"}))

"""Sampled tokens per second of episodes of three turns, over those of single turns with as many sampled tokens; and
of the same episodes with an agent that knows a base URL, over those of reset and step.

    python tools/bench_episodes.py [--rounds 5] [--episodes 32] [--in-flight 32] [--turn-tokens 256]

All are sampled as in training, take turns, and share a vLLM server with a prefix cache and a 10M-parameter policy in
float32. A turn has half to one and a half times --turn-tokens: its closing tag is forced, and there alone this policy
ends a turn. A tool then answers with 1 to --tool-tokens tokens at once.

Then the same episodes with tools that take --tool-seconds: the share of time in which the engine has no request while
--in-flight episodes are running. Prints one JSON line.
"""

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path

import harness
from checkout import explained

parser = harness.benchmark(
    __doc__, rounds=5, episodes=32, in_flight=32, turn_tokens=256, tool_tokens=128, tool_seconds=2.0
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import aiohttp
    import psutil
    import torch
    from bench_rollouts import SHAPE
    from process_figures import processor_s
    from random_inputs import random_model, recipe_of
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from megatron_scalerl.launch.process import EngineProcess
    from megatron_scalerl.rewards.pool import VerifierPool
    from megatron_scalerl.rollouts.episodes import sampling
    from megatron_scalerl.rollouts.plans import Draw, Plans
    from megatron_scalerl.types import Prompt

ARMS = ("episodes", "single", "agent")
TURNS = 3
END = 256
CLOSE = 257
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROMPT = 64
AROUND = 24
"""At least the tokens of a turn that are neither thinking nor the tool's."""


class Tool:
    """Answers with 1 to `tokens` letters after `seconds`; the last turn ends the episode."""

    async def reset(self, row):
        self.row = row
        self.source = random.Random(row["text"])
        self.left = TURNS
        return row["text"]

    async def step(self, response):
        self.left -= 1
        if not self.left:
            return [], True, True
        await asyncio.sleep(self.row["seconds"])
        return "a" * self.source.randint(1, self.row["tokens"]), None, False


class Agent:
    """Asks the policy over the route, and answers with the tool."""

    async def run(self, row, agent):
        tool = Tool()
        messages = [{"role": "user", "content": await tool.reset(row)}]
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        done = False
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None)) as client:
            while not done:
                async with client.post(f"{agent.base_url}/chat/completions", json={"messages": messages}) as response:
                    [choice] = (await response.json())["choices"]
                result, reward, done = await tool.step(None)
                messages += [choice["message"], {"role": "user", "content": result}]
        return reward


def write_policy(folder):
    """A policy that samples END after CLOSE alone, and never CLOSE; its tokenizer, with a token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    inner.add_tokens(["</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    model = random_model(**SHAPE, bos_token_id=None, eos_token_id=END, max_position_embeddings=8192)
    with torch.no_grad():  # dimension 0 of the residual stream tells CLOSE from all other tokens
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = -1
        model.model.embed_tokens.weight[CLOSE, 0] = 1
        model.lm_head.weight[[END, CLOSE]] = 0
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[[END, CLOSE], 0] = torch.tensor([20.0, 10.0])
    model.save_pretrained(folder)
    return tokenizer


def recipe(folder, o, arm):
    """Of one arm."""
    thinking = [o.turn_tokens // 2, o.turn_tokens * 3 // 2]
    longest = TURNS * (thinking[1] + o.tool_tokens + AROUND)
    name = "bench_episodes:Agent" if arm == "agent" else "bench_episodes:Tool"
    blocks = {"environment": {"name": name, "max_turns": TURNS, "episode_tokens": longest}}
    if arm == "single":
        thinking = [1, longest]
        blocks = {}
    chat = {"chat_template": True, "think_start": "", "think_end": "</think>"}
    vllm = {"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": o.in_flight, "max_model_len": longest + 2 * PROMPT}
    return recipe_of(
        folder,
        prompts={"path": "none", "max_prompt_tokens": PROMPT, **chat},
        interruption={"phrase": "", "thinking_tokens": thinking, "answer_tokens": 1},
        rewards={"verifier": "stand_in_engines:accept", "workers": 1},
        engine={"vllm": vllm},
        **blocks,
    )


def jobs(o, arm, plans, tokenizer, seconds):
    """(prompt, draw) of every episode, or of a single turn with its tokens. seconds: of its tools."""
    extra = {"tokens": o.tool_tokens, "seconds": seconds}
    for number in range(o.episodes):
        text = f"{number:030}"
        messages = [{"role": "user", "content": text}]
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = Prompt(prompt_id=text, text=text, answer="", token_ids=tuple(tokenizer.encode(shown)), extra=extra)
        draw = plans.draw(0, number, 0)
        if arm == "single":
            cut = sum(plans.turn(draw, turn).thinking_cut for turn in range(TURNS)) + TURNS - 1
            draw = Draw(seed=draw.seed, thinking_cut=cut)
        yield prompt, draw


async def figures_of(process, sampler, work, in_flight):
    """Figures of all jobs with at most `in_flight` at a time."""
    gate = asyncio.Semaphore(in_flight)
    server = psutil.Process(process.server.pid)
    pids = [child.pid for child in (server, *server.children(recursive=True))]
    idle = []

    async def watch():
        while True:
            await asyncio.sleep(0.02)
            if gate.locked():
                idle.append(process.client.in_flight == 0)

    async def one(prompt, draw):
        async with gate:
            return (await sampler.complete(process.client, prompt, draw, priority=1)).completion

    # another label of the weights: what earlier work has cached is not for this one
    await process.client.set_version(1)
    watching = asyncio.create_task(watch())
    used = processor_s(pids)
    begin = time.perf_counter()
    completions = await asyncio.gather(*(one(*job) for job in work))
    seconds = time.perf_counter() - begin
    watching.cancel()
    sampled = sum(completion.sampled_tokens for completion in completions)
    return {
        "tokens_per_s": sampled / seconds,
        "engine_us_per_token": 1e6 * (processor_s(pids) - used) / sampled,
        "engine_idle": statistics.mean(idle or [0]),
        "sampled_tokens": sampled,
        "environment_tokens": sum(completion.environment_tokens for completion in completions),
    }


async def measure(folder, o):
    """Figures of each arm in each round, and with slow tools."""
    tokenizer = write_policy(folder)
    recipes = {arm: recipe(folder, o, arm) for arm in ARMS}
    plans = Plans(recipes["episodes"], tokenizer)
    process = EngineProcess.local(recipes["episodes"], secret="bench", log_path=folder / "engine.log")
    figures = {arm: [] for arm in ARMS}
    samplers = {}
    async with contextlib.AsyncExitStack() as running:
        running.push_async_callback(process.stop)
        await process.start()
        verifier = await running.enter_async_context(VerifierPool(recipes["single"].rewards))
        for arm in ARMS:
            pools = sampling(recipes[arm], tokenizer, verifier=verifier, logs=folder)
            samplers[arm] = (await running.enter_async_context(pools))(recipes[arm])

        def run(arm, seconds=0.0):
            work = jobs(o, arm, plans, tokenizer, seconds)
            return figures_of(process, samplers[arm], work, o.in_flight)

        for number, arm in harness.turns(ARMS, 1 + o.rounds):
            row = await run(arm)
            if number:  # the first round warms up
                figures[arm].append(row)
        return {arm: harness.columns(rows) for arm, rows in figures.items()}, await run("episodes", o.tool_seconds)


def main(o):
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        figures, slow = asyncio.run(measure(Path(folder), o))
    ratios = harness.paired(*(figures[arm]["tokens_per_s"] for arm in ("episodes", "single")))
    over_route = harness.paired(*(figures[arm]["tokens_per_s"] for arm in ("agent", "episodes")))
    line = {
        "ratio": statistics.median(ratios),
        "ratio_of_each_round": ratios,
        "agent_ratio": statistics.median(over_route),
        "agent_ratio_of_each_round": over_route,
        "target": 0.95,
        **{arm: harness.medians(figures[arm]) for arm in ARMS},
        "slow_tools": slow,
    }
    harness.report(o, line)


if __name__ == "__main__":
    main(OPTIONS)

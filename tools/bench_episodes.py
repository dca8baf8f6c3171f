"""Sampled tokens per second of episodes of three turns, over those of single turns with as many sampled tokens.

    python tools/bench_episodes.py [--rounds 5] [--episodes 96] [--in-flight 32] [--turn-tokens 256] [--tool-tokens 128]

Both are sampled as in training by one vLLM server with a prefix cache, which serves a 10M-parameter policy in float32,
and take turns. A turn has half to one and a half times --turn-tokens; its closing tag is forced, and the policy of
this benchmark ends the turn there and nowhere else. A tool then answers with 1 to --tool-tokens tokens, without delay.
Then the same episodes with tools that take --tool-seconds: the share of time in which the engine has no request while
--in-flight episodes are running. Prints one JSON line.
"""

import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path

import harness
from checkout import explained

parser = harness.benchmark(
    __doc__,
    rounds=5,
    episodes=96,
    in_flight=32,
    turn_tokens=256,
    tool_tokens=128,
    tool_seconds=2.0,
    threads=1,
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import psutil
    import torch
    from bench_rollouts import SHAPE
    from process_figures import processor_s
    from random_inputs import random_model, recipe_of
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from megatron_scalerl.launch.process import EngineProcess
    from megatron_scalerl.rewards.pool import VerifierPool
    from megatron_scalerl.rollouts.episodes import sampling
    from megatron_scalerl.rollouts.plans import Draw, Plans
    from megatron_scalerl.types import Prompt

TARGET = 0.95
TURNS = 3
OPEN = 256
END = 257
CLOSE = 258
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = 96
BETWEEN = 32
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


def write_policy(folder):
    """A policy with a token per byte, which samples END after CLOSE alone, and never CLOSE; its tokenizer."""
    inner = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    inner.add_tokens([AddedToken("</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    model = random_model(**SHAPE, bos_token_id=None, eos_token_id=END, max_position_embeddings=8192)
    with torch.no_grad():  # dimension 0 tells CLOSE from all other tokens
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = -1
        model.model.embed_tokens.weight[CLOSE, 0] = 1
        head = model.lm_head.weight
        head[:, 0] = 0
        for token, value in ((END, 20.0), (CLOSE, 10.0), (OPEN, 10.0)):
            head[token] = 0
            head[token, 0] = value
    model.save_pretrained(folder)
    return tokenizer


def recipe(folder, o, arm):
    """Of one arm."""
    low = o.turn_tokens // 2
    high = o.turn_tokens + low
    longest = TURNS * (high + o.tool_tokens + BETWEEN)
    thinking = [low, high]
    blocks = {"environment": {"name": "bench_episodes:Tool", "max_turns": TURNS, "episode_tokens": longest}}
    if arm == "single":
        thinking = [TURNS * low, TURNS * high + TURNS]
        blocks = {}
    vllm = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "max_num_seqs": o.in_flight}
    vllm["max_model_len"] = longest + PROMPT + BETWEEN
    return recipe_of(
        folder,
        prompts={
            "path": "none", "max_prompt_tokens": PROMPT, "chat_template": True, "think_start": "", "think_end": "</think>"
        },
        interruption={"phrase": "", "thinking_tokens": thinking, "answer_tokens": 1},
        rewards={"verifier": "stand_in_engines:accept", "workers": 1},
        engine={"threads": o.threads, "vllm": vllm},
        **blocks,
    )  # fmt: skip


def jobs(o, sampler, plans, tokenizer, *, seconds):
    """(prompt, draw) of every episode; without a sampler of episodes those of single turns of the same length."""
    for number in range(o.episodes):
        text = f"{random.Random(number).getrandbits(120):030x}"
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        extra = {"tokens": o.tool_tokens, "seconds": seconds}
        prompt = Prompt(prompt_id=text, text=text, answer="", token_ids=tuple(shown), extra=extra)
        draw = plans["episodes"].draw(0, number, 0)
        if sampler == "single":
            cuts = [plans["episodes"].turn(draw, turn).thinking_cut for turn in range(TURNS)]
            draw = Draw(seed=draw.seed, thinking_cut=sum(cuts) + TURNS - 1)
        yield prompt, draw


async def measure_arm(process, sampler, work, in_flight):
    """Figures of all jobs with at most `in_flight` at a time."""
    client = process.client
    engine = psutil.Process(process.server.pid)
    pids = {"engine": [engine, *engine.children(recursive=True)], "controller": [psutil.Process()]}
    known = {p.pid for group in pids.values() for p in group}
    pids["others"] = [p for p in psutil.Process().children(recursive=True) if p.pid not in known]
    pids = {name: [p.pid for p in group] for name, group in pids.items()}
    gate = asyncio.Semaphore(in_flight)
    ticks = {True: 0, False: 0}

    async def watch():
        while True:
            await asyncio.sleep(0.005)
            if gate.locked():
                ticks[client.in_flight == 0] += 1

    async def one(prompt, draw):
        async with gate:
            return (await sampler.complete(client, prompt, draw, priority=1)).completion

    watching = asyncio.create_task(watch())
    used = {name: processor_s(group) for name, group in pids.items()}
    begin = time.perf_counter()
    completions = await asyncio.gather(*(one(*job) for job in work))
    seconds = time.perf_counter() - begin
    watching.cancel()
    sampled = sum(completion.sampled_tokens for completion in completions)
    return {
        "rate": sampled / seconds,
        "sampled": sampled,
        "environment": sum(completion.environment_tokens for completion in completions),
        "processor_us": {n: 1e6 * (processor_s(group) - used[n]) / sampled for n, group in pids.items()},
        "idle": ticks[True] / max(1, sum(ticks.values())),
    }


async def measure(folder, o):
    """Figures of both arms in each round, and of the slow tools."""
    tokenizer = write_policy(folder)
    recipes = {arm: recipe(folder, o, arm) for arm in ("episodes", "single")}
    plans = {arm: Plans(found, tokenizer) for arm, found in recipes.items()}
    process = EngineProcess.local(recipes["episodes"], secret="bench", log_path=folder / "engine.log")
    figures = {arm: [] for arm in recipes}
    async with contextlib.AsyncExitStack() as running:
        running.push_async_callback(process.stop)
        await process.start()
        verifier = await running.enter_async_context(VerifierPool(recipes["single"].rewards))
        labels = itertools.count(1)
        samplers = {}
        for arm, found in recipes.items():
            pools = sampling(found, tokenizer, plans[arm], verifier=verifier, logs=folder)
            samplers[arm] = (await running.enter_async_context(pools))(plans[arm])

        async def figures_of(arm, seconds=0.0):
            # another label: no round gets the cached prefixes of one before
            await process.client.set_version(next(labels))
            work = jobs(o, arm, plans, tokenizer, seconds=seconds)
            return await measure_arm(process, samplers[arm], list(work), o.in_flight)

        for number, arm in harness.turns(list(recipes), 1 + o.rounds):
            row = await figures_of(arm)
            if number:  # the first round warms up
                figures[arm].append(row)
        slow = await figures_of("episodes", o.tool_seconds)
    return figures, slow


def main(o):
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        figures, slow = asyncio.run(measure(Path(folder), o))
    rates = {arm: harness.columns(rows)["rate"] for arm, rows in figures.items()}
    episodes = figures["episodes"][0]
    assert episodes["sampled"] == figures["single"][0]["sampled"]
    ratios = harness.paired(rates["episodes"], rates["single"])
    line = {
        "bench": "episodes",
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_each_round": [round(ratio, 3) for ratio in ratios],
        "tokens_per_s": {arm: round(rate) for arm, rate in harness.medians(rates).items()},
        "target": TARGET,
        "sampled_tokens": episodes["sampled"],
        "environment_tokens": episodes["environment"],
        "processor_us_per_token": {
            arm: harness.rounded(harness.medians(harness.columns([row["processor_us"] for row in rows])), 0)
            for arm, rows in figures.items()
        },
        "slow_tools": harness.rounded({"tokens_per_s": slow["rate"], "engine_idle": slow["idle"]}),
        "options": harness.asked(o),
        "machine": harness.machine(),
    }
    harness.report(o, line)


if __name__ == "__main__":
    main(OPTIONS)

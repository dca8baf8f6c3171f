"""Tokens per second through our engine client, over those of vLLM's offline LLM.generate.

    python tools/bench_rollouts.py [--rounds 5] [--requests 256] [--in-flight 64] [--threads 1]

Both sides serve the same 10M-parameter policy in float32 with the same prompts, lengths, seeds and log-probs, one
thread each, and take turns. Ours runs as in training: vLLM's server in separate processes, HTTP, `in-flight`
concurrent requests, the logits processor of forced interruption on every request. LLM.generate is one process without
these and gets all prompts at once. Prints one JSON line.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import harness
from checkout import explained

parser = harness.benchmark(__doc__, rounds=5, requests=256, in_flight=64, threads=1, offline=(str, argparse.SUPPRESS))

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from random_inputs import random_llama, recipe_of

    from megatron_scalerl.engine.client import SamplingSpec
    from megatron_scalerl.engine.interruption import Plan
    from megatron_scalerl.launch.process import EngineProcess

VOCAB = 512
PROMPT = 31
SHORTEST = 64
LONGEST = 192
ENGINE = {
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 640 << 20,
    "skip_tokenizer_init": True,
}
SHAPE = dict(vocab=VOCAB, hidden=320, layers=8, inner=896, heads=5, groups=5)
"""A random Llama of 10.6M parameters."""


def work(requests):
    """(prompt, number of new tokens, seed) of every request, the same on both sides."""
    draw = random.Random(0)

    def prompt():
        return [draw.randrange(3, VOCAB) for _ in range(PROMPT)]

    return [(prompt(), draw.randint(SHORTEST, LONGEST), seed) for seed in range(requests)]


async def ours(process, jobs, in_flight):
    """Seconds for all jobs with at most `in_flight` requests at a time."""
    gate = asyncio.Semaphore(in_flight)
    # a cut that no completion reaches: the processor looks at every token and forces none
    plan = Plan(cut=400, phrase_ids=(5, 4), think_end_ids=(4,), answer_budget=400, eos_id=2)

    async def one(prompt, tokens, seed):
        spec = SamplingSpec(max_tokens=tokens, seed=seed, interruption=plan, ignore_eos=True)
        async with gate:
            return len((await process.client.generate(prompt, sampling=spec)).token_ids)

    begin = time.perf_counter()
    lengths = await asyncio.gather(*(one(*job) for job in jobs))
    seconds = time.perf_counter() - begin
    assert lengths == [tokens for _, tokens, _ in jobs]
    return seconds


class Offline:
    """The other process: vLLM offline."""

    def __init__(self, args):
        from vllm import LLM, SamplingParams

        options = dict(dtype="float32", max_num_seqs=args.in_flight, enable_prefix_caching=False)
        self._llm = LLM(args.offline, **options, **ENGINE)
        self._jobs = work(args.requests)
        self._prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in self._jobs]
        self._params = [
            SamplingParams(max_tokens=tokens, seed=seed, logprobs=0, detokenize=False, ignore_eos=True)
            for _, tokens, seed in self._jobs
        ]

    def seconds(self):
        """Of all jobs."""
        begin = time.perf_counter()
        outputs = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert [len(o.outputs[0].token_ids) for o in outputs] == [tokens for _, tokens, _ in self._jobs]
        return seconds


async def measure(folder, args):
    """Tokens per second of both sides in each round, which take turns."""
    recipe = recipe_of(
        folder,
        prompts={"path": "none", "max_prompt_tokens": PROMPT},
        interruption={"thinking_tokens": [1, LONGEST], "answer_tokens": 1},
        engine={"threads": args.threads, "vllm": {**ENGINE, "max_num_seqs": args.in_flight}},
    )
    process = EngineProcess.local(recipe, secret="bench", log_path=Path(folder) / "engine.log")
    offline = harness.Partner(__file__, *sys.argv[1:], "--offline", folder, OMP_NUM_THREADS=str(args.threads))
    rates = {"ours": [], "offline": []}
    try:
        offline.answer()
        await process.start()
        jobs = work(args.requests)
        tokens = sum(n for _, n, _ in jobs)
        for number, side in harness.turns(list(rates), 1 + args.rounds):
            if side == "ours":
                seconds = await ours(process, jobs, args.in_flight)
            else:
                offline.ask("seconds")
                seconds = await asyncio.to_thread(offline.answer)
            if number:  # the first round warms up
                rates[side].append(tokens / seconds)
    finally:
        await process.stop()
        offline.end()
    return rates


def main(args):
    """Measure and print both sides' tokens per second and their ratio."""
    if args.offline:
        harness.partner(Offline, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        random_llama(folder, dtype="float32", **SHAPE, max_position_embeddings=2048)
        rates = asyncio.run(measure(folder, args))
    medians = harness.medians(rates)
    line = {
        "ratio": medians["ours"] / medians["offline"],
        "ratio_of_each_round": harness.paired(rates["ours"], rates["offline"]),
        "tokens_per_s": medians,
        "target": 0.85,
    }
    harness.report(args, line)


if __name__ == "__main__":
    main(OPTIONS)

"""Tokens per second through our engine client, over those of vLLM's offline LLM.generate.

    python tools/bench_rollouts.py [--rounds 5] [--requests 256] [--in-flight 64] [--threads 1]

Both sides serve the same 10M-parameter policy in float32 with the same prompts, lengths, seeds and log-probs, one
thread each, and take turns. Ours runs as in training: vLLM's server in separate processes, HTTP, `in-flight`
concurrent requests, the logits processor of forced interruption on every request. LLM.generate is one process without
these and gets all prompts at once. Prints one JSON line.
"""

import argparse
import asyncio
import os
import random
import subprocess
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


def theirs(folder, requests, in_flight):
    """The other process: vLLM offline. Answers each line on its input with the seconds for all jobs."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", max_num_seqs=in_flight, enable_prefix_caching=False, **ENGINE)
    jobs = work(requests)
    prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in jobs]
    params = [
        SamplingParams(max_tokens=tokens, seed=seed, logprobs=0, detokenize=False, ignore_eos=True)
        for _, tokens, seed in jobs
    ]
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert [len(o.outputs[0].token_ids) for o in outputs] == [tokens for _, tokens, _ in jobs]
        print(seconds, flush=True)


def start_theirs(folder, args):
    """The offline side as a child, ready to run."""
    env = os.environ | {
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--offline", folder, "--requests", str(args.requests)]
    command += ["--in-flight", str(args.in_flight)]
    child = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    answer(child, "ready")
    return child


def answer(child, prefix=""):
    """The child's next line, past what vLLM itself prints."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(prefix) and (prefix or line[0].isdigit()):
            return line.strip()
    raise RuntimeError("the offline side ended")


async def measure(folder, args):
    """Tokens per second of both sides in each round, which take turns."""
    recipe = recipe_of(
        folder,
        prompts={"path": "none", "max_prompt_tokens": PROMPT},
        interruption={"thinking_tokens": [1, LONGEST], "answer_tokens": 1},
        engine={"threads": args.threads, "vllm": {**ENGINE, "max_num_seqs": args.in_flight}},
    )
    process = EngineProcess.local(recipe, secret="bench", log_path=Path(folder) / "engine.log")
    child = start_theirs(folder, args)
    assert child.stdin is not None
    rates = {"ours": [], "offline": []}
    try:
        await process.start()
        jobs = work(args.requests)
        tokens = sum(n for _, n, _ in jobs)
        for number, side in harness.turns(list(rates), 1 + args.rounds):
            if side == "ours":
                seconds = await ours(process, jobs, args.in_flight)
            else:
                print("go", file=child.stdin, flush=True)
                seconds = float(await asyncio.to_thread(answer, child))
            if number:  # the first round warms up
                rates[side].append(tokens / seconds)
    finally:
        await process.stop()
        child.stdin.close()
        child.wait()
    return rates


def main(args):
    """Measure and print both sides' tokens per second and their ratio."""
    if args.offline:
        theirs(args.offline, args.requests, args.in_flight)
        return
    with tempfile.TemporaryDirectory() as folder:
        random_llama(folder, dtype="float32", **SHAPE, max_position_embeddings=2048)
        rates = asyncio.run(measure(folder, args))
    medians = harness.medians(rates)
    line = {
        "bench": "rollouts",
        "ratio": round(medians["ours"] / medians["offline"], 3),
        "ratio_of_each_round": [round(ratio, 3) for ratio in harness.paired(rates["ours"], rates["offline"])],
        **{f"{side}_tokens_per_s": round(rate) for side, rate in medians.items()},
        "target": 0.85,
        **harness.asked(args, "in_flight", "requests", "threads", "rounds"),
        "machine": harness.machine(),
    }
    harness.report(args, line)


if __name__ == "__main__":
    main(OPTIONS)

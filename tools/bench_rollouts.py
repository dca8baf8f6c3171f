"""Tokens per second through our engine client, over those of vLLM's offline LLM.generate.

    python tools/bench_rollouts.py [--rounds 5] [--requests 256] [--in-flight 64] [--threads 1]

Both sides serve the same 10M-parameter policy in float32 with the same prompts, lengths, seeds and log-probs, one
thread each, and take turns. Ours runs as in training: vLLM's server in separate processes, HTTP, `in-flight`
concurrent requests, the logits processor of forced interruption on every request. LLM.generate is one process without
these and gets all prompts at once. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--requests", type=int, default=256)
    p.add_argument("--in-flight", type=int, default=64)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--offline", metavar="FOLDER", help=argparse.SUPPRESS)
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from megatron_scalerl.engine.client import SamplingSpec
    from megatron_scalerl.engine.interruption import Plan
    from megatron_scalerl.launch.process import EngineProcess
    from megatron_scalerl.recipe import Recipe

VOCAB, PROMPT, SHORTEST, LONGEST = 512, 31, 64, 192
ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 640 << 20,
    "skip_tokenizer_init": True,
}


def make_policy(folder: str) -> None:
    """A random Llama of 10.6M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 320, "num_hidden_layers": 8, "intermediate_size": 896, "num_attention_heads": 5}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)


def work(requests: int) -> list[tuple[list[int], int, int]]:
    """(prompt, number of new tokens, seed) of every request, the same on both sides."""
    draw = random.Random(0)

    def prompt() -> list[int]:
        return [draw.randrange(3, VOCAB) for _ in range(PROMPT)]

    return [(prompt(), draw.randint(SHORTEST, LONGEST), seed) for seed in range(requests)]


async def ours(process: EngineProcess, jobs: list[tuple[list[int], int, int]], in_flight: int) -> float:
    """Seconds for all jobs with at most `in_flight` requests at a time."""
    gate = asyncio.Semaphore(in_flight)
    # a cut that no completion reaches: the processor looks at every token and forces none
    plan = Plan(cut=400, phrase_ids=(5, 4), think_end_ids=(4,), answer_budget=400, eos_id=2)

    async def one(prompt: list[int], tokens: int, seed: int) -> int:
        spec = SamplingSpec(max_tokens=tokens, seed=seed, interruption=plan, ignore_eos=True)
        async with gate:
            return len((await process.client.generate(prompt, sampling=spec)).token_ids)

    begin = time.perf_counter()
    lengths = await asyncio.gather(*(one(*job) for job in jobs))
    seconds = time.perf_counter() - begin
    assert lengths == [tokens for _, tokens, _ in jobs]
    return seconds


def theirs(folder: str, requests: int, in_flight: int) -> None:
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


def start_theirs(folder: str, args: argparse.Namespace) -> subprocess.Popen[str]:
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


def answer(child: subprocess.Popen[str], prefix: str = "") -> str:
    """The child's next line, past what vLLM itself prints."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(prefix) and (prefix or line[0].isdigit()):
            return line.strip()
    raise RuntimeError("the offline side ended")


async def measure(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate the two sides and summarise."""
    vllm = {**ENGINE, "max_num_seqs": args.in_flight}
    recipe = Recipe(
        name="bench",
        steps=1,
        policy={"path": folder, "dtype": "float32"},
        prompts={"path": "none", "max_prompt_tokens": PROMPT},
        interruption={"thinking_tokens": [1, LONGEST], "answer_tokens": 1},
        engine={"threads": args.threads, "vllm": vllm},
    )
    process = EngineProcess.local(recipe, secret="bench", log_path=Path(folder) / "engine.log")
    child = start_theirs(folder, args)
    try:
        await process.start()
        jobs = work(args.requests)
        tokens = sum(n for _, n, _ in jobs)
        rates: dict[str, list[float]] = {"ours": [], "offline": []}
        await ours(process, jobs[: args.in_flight], args.in_flight)
        for _ in range(args.rounds + 1):
            assert child.stdin is not None
            print("go", file=child.stdin, flush=True)
            rates["offline"].append(tokens / float(await asyncio.to_thread(answer, child)))
            rates["ours"].append(tokens / await ours(process, jobs, args.in_flight))
    finally:
        await process.stop()
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    return summary({side: values[1:] for side, values in rates.items()}, args)


def summary(rates: dict[str, list[float]], args: argparse.Namespace) -> dict[str, Any]:
    """Both sides' tokens per second, their ratio, and the machine."""
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "bench": "rollouts",
        "ratio": round(medians["ours"] / medians["offline"], 3),
        "ratio_of_each_round": [round(a / b, 3) for a, b in zip(rates["ours"], rates["offline"])],
        "ours_tokens_per_s": round(medians["ours"]),
        "offline_tokens_per_s": round(medians["offline"]),
        "target": 0.85,
        "in_flight": args.in_flight,
        "requests": args.requests,
        "threads": args.threads,
        "rounds": args.rounds,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


def main(args: argparse.Namespace) -> None:
    """Measure and print."""
    if args.offline:
        theirs(args.offline, args.requests, args.in_flight)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_policy(folder)
        print(json.dumps(asyncio.run(measure(folder, args))))


if __name__ == "__main__":
    main(OPTIONS)

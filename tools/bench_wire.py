"""Bytes per token and seconds from a released batch to the start of its step, over the bounds of this machine.

    python tools/bench_wire.py [--tokens 2000000] [--completion 8000] [--prompt 200] [--rounds 5]

A real client sends over its encrypted sockets to stand-in ranks: processes that receive, check and build the batch as
a trainer's rank does, and train nothing. Completions are bytes in memory, as a store returns them. Layouts: one rank;
two data-parallel ranks, which get half each; two tensor-parallel ranks, of which the first gets the batch (the
broadcast to its peer is Megatron's and is not part of this). Bounds, for the same bytes: one message from socket to
socket with CURVE and nothing else, and a copy in memory. Prints one JSON line a layout, medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
from checkout import explained

parser = harness.benchmark(
    __doc__,
    tokens=(2_000_000, "tokens of a batch, prompts excluded"),
    completion=(8_000, "tokens of a completion"),
    prompt=(200, "tokens of a prompt"),
    rounds=5,
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import numpy as np
    import zmq
    from random_inputs import random_completion, recipe_of

    from megatron_scalerl.batching.assignment import SampleFacts, StepPlan, plan_step
    from megatron_scalerl.batching.rollout_bytes import write
    from megatron_scalerl.distributed.rendezvous import FolderRendezvous
    from megatron_scalerl.trainer import messages
    from megatron_scalerl.trainer.client import TrainerClient

VOCAB, MICRO_BATCH_TOKENS, SECRET = 128_000, 32_768, "bench"
LAYOUTS = {"one rank": (1, 1), "two data-parallel ranks": (2, 2), "two tensor-parallel ranks": (2, 1)}
"""World size and data-parallel size."""


def plan_of(options: argparse.Namespace, dp_size: int, count: int, step: int) -> StepPlan:
    """The assignment of `count` equal samples."""
    ids = np.random.default_rng(1).integers(0, VOCAB, (count, options.prompt)).tolist()
    samples = [
        SampleFacts(prompt_token_ids=tuple(prompt), tokens=options.completion, advantage=0.3, token_weight=1e-6)
        for prompt in ids
    ]
    limit = max(MICRO_BATCH_TOKENS, options.prompt + options.completion)
    return plan_step(samples, step=step, dp_size=dp_size, micro_batch_tokens=limit, policy_version=step - 1)


async def measure(options: argparse.Namespace, completions: list[bytes], world_size: int, dp_size: int) -> dict:
    """Seconds of each round in one layout; the first one, which allocates, is left out."""

    async def read(numbers: Any) -> list[bytes]:
        return [completions[number] for number in numbers]

    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        client = TrainerClient(
            world_size=world_size,
            run_id="bench",
            incarnation="1",
            secret=SECRET,
            rendezvous=FolderRendezvous(folder=folder),
            command_timeout_s=600,
        )
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(recipe_of("none", trainer={"micro_batch_tokens": MICRO_BATCH_TOKENS}).model_dump_json())
        env = os.environ | {"MSRL_RECIPE": str(recipe)}
        command = [sys.executable, str(Path(__file__).with_name("stand_in_trainer.py")), "0", str(dp_size)]
        ranks = [subprocess.Popen(command, env=env | client.worker_env(r)) for r in range(world_size)]
        try:
            await client.wait_ready(120)
            for step in range(1, options.rounds + 2):
                plan = plan_of(options, dp_size, len(completions), step)
                begin, busy = time.perf_counter(), time.thread_time()
                await client.prepare(plan, read)
                loop = time.thread_time() - busy
                answer = await client.step(step)
                seconds = {"seconds": time.perf_counter() - begin, "loop_seconds": loop}
                rows.append(seconds | {"build_seconds": answer.seconds})
            await client.stop()
        finally:
            client.close()
            for rank in ranks:
                rank.wait()
    return harness.columns(rows[1:])


def sent_bytes(plan: StepPlan, completions: list[bytes]) -> int:
    """Bytes of all messages of a step's batch."""
    total = 0
    for part, numbers in zip(plan.ranks, plan.numbers):
        total += sum(map(len, messages.batch_frames(part, [completions[number] for number in numbers])))
    return total


def bounds(size: int, rounds: int) -> dict[str, float]:
    """Median seconds for `size` bytes: a message between two sockets here, encrypted with CURVE, and a copy."""
    server, client = zmq.Context(), zmq.Context()
    push, pull = server.socket(zmq.PUSH), client.socket(zmq.PULL)
    push.curve_server = True
    public, push.curve_secretkey = zmq.curve_keypair()
    push.curve_publickey = pull.curve_serverkey = public
    pull.curve_publickey, pull.curve_secretkey = zmq.curve_keypair()
    pull.connect(f"tcp://127.0.0.1:{push.bind_to_random_port('tcp://127.0.0.1')}")
    data = os.urandom(size)
    source = np.frombuffer(data, np.uint8)

    def message() -> None:
        sending = threading.Thread(target=push.send, args=(data,), kwargs={"copy": False})
        sending.start()
        pull.recv(copy=False)
        sending.join()

    arms = {"curve_seconds": message, "copy_seconds": partial(np.copyto, np.empty_like(source), source)}
    seconds = harness.in_rounds({arm: partial(harness.seconds_of, work) for arm, work in arms.items()}, rounds)
    for context in (client, server):
        context.destroy(linger=0)
    return harness.medians(seconds)


def main(options: argparse.Namespace) -> None:
    """Measure every layout and print."""
    count = max(1, options.tokens // options.completion)
    generator = np.random.default_rng(0)
    completions = [write(random_completion(generator, options.completion, ids=(0, VOCAB))) for _ in range(count)]
    for name, (world_size, dp_size) in LAYOUTS.items():
        found = asyncio.run(measure(options, completions, world_size, dp_size))
        size = sent_bytes(plan_of(options, dp_size, count, 1), completions)
        median = harness.medians(found) | bounds(size, options.rounds)
        line = {
            "bench": "wire",
            "layout": name,
            "tokens": count * options.completion,
            "bytes_per_token": round(size / (count * options.completion), 3),
            "spread": harness.extremes(found)["seconds"],
            **harness.rounded(median, 5),
            "curve_over_ours": round(median["curve_seconds"] / median["seconds"], 3),
            "machine": harness.machine(),
        }
        harness.report(options, line)


if __name__ == "__main__":
    main(OPTIONS)

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
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=2_000_000, help="tokens of a batch, prompts excluded")
    p.add_argument("--completion", type=int, default=8_000, help="tokens of a completion")
    p.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--stand-in-rank", type=int, metavar="DP_SIZE", help=argparse.SUPPRESS)
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import msgspec
    import numpy as np
    import zmq

    from megatron_scalerl.batching.assignment import SampleFacts, StepPlan, plan_step
    from megatron_scalerl.batching.rollout_bytes import RolloutArrays, write
    from megatron_scalerl.distributed.rendezvous import FolderRendezvous
    from megatron_scalerl.trainer import messages
    from megatron_scalerl.trainer.client import TrainerClient
    from megatron_scalerl.trainer.worker import ControllerLink, WorkerSettings
    from megatron_scalerl.types import StepReport

VOCAB, MICRO_BATCH_TOKENS, SECRET = 128_000, 32_768, "bench"
LAYOUTS = {"one rank": (1, 1), "two data-parallel ranks": (2, 2), "two tensor-parallel ranks": (2, 1)}
"""World size and data-parallel size."""


def stand_in_rank(dp_size: int) -> None:
    """One rank that builds its batches and answers each step with the seconds that this took."""
    from megatron_scalerl.trainer.batch_frames import BatchFrames

    settings = WorkerSettings.from_environment({**os.environ, "MSRL_RECIPE": "none"})
    holds, alone = settings.rank < dp_size, SimpleNamespace(size=lambda: 1)
    place: Any = SimpleNamespace(holds_batch=holds, groups=SimpleNamespace(mp=alone, cp=alone))
    trainer = SimpleNamespace(micro_batch_tokens=MICRO_BATCH_TOKENS, experts=None, pad_multiple=1)
    batches = BatchFrames(trainer, place)
    link = ControllerLink(settings)
    link.greet()
    link.receive()  # Meet
    facts = {
        "parameters": 1,
        "vocab_size": VOCAB,
        "device": "cpu",
        "backend": "gloo",
        "dtype": "none",
        "logits": "none",
    }
    info = messages.TrainerInfo(world_size=settings.world_size, dp_size=dp_size, **facts)
    ready = messages.Ready(rank=settings.rank, dp_rank=settings.rank % dp_size, holds_batch=holds, info=info)
    link.send(ready)
    while True:
        message, frames = link.receive()
        if isinstance(message, messages.Prepare):
            link.send(messages.Held(rank=settings.rank, step=batches.hold(frames)))
            continue
        value = None
        if isinstance(message, messages.Step):
            begin = time.perf_counter()
            if holds:
                batches.take(message.step)
            value = report(message.step, time.perf_counter() - begin)
        else:
            link.leave()
        assert not isinstance(message, messages.Welcome | messages.Meet | messages.Ping | messages.Refused)
        done = messages.Done(call=message.call, rank=settings.rank, value=msgspec.Raw(messages.encode(value)))
        link.send(done)
        if isinstance(message, messages.Stop):
            return


def report(step: int, seconds: float) -> StepReport:
    """The answer to a step."""
    none = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "tokens": 0, "metrics": {}}
    return StepReport(step=step, policy_version=step, seconds=seconds, **none)  # type: ignore[arg-type]


def completion(tokens: int, generator: np.random.Generator) -> bytes:
    """A random completion of one policy version, without forced tokens."""
    return write(
        RolloutArrays(
            token_ids=generator.integers(0, VOCAB, tokens, dtype=np.uint32),
            rollout_logprobs=-generator.random(tokens, dtype=np.float32),
            policy_versions=np.zeros(tokens, dtype=np.int64),
            loss_mask=np.ones(tokens, dtype=bool),
            interrupted=False,
            truncated=False,
            thinking_cut=0,
            seed=0,
        )
    )


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
    """Seconds of each round in one layout."""

    async def read(numbers: Any) -> list[bytes]:
        return [completions[number] for number in numbers]

    found: dict[str, list[float]] = {"seconds": [], "loop_seconds": [], "build_seconds": []}
    with tempfile.TemporaryDirectory() as folder:
        client = TrainerClient(
            world_size=world_size,
            run_id="bench",
            incarnation="1",
            secret=SECRET,
            rendezvous=FolderRendezvous(folder=folder),
            command_timeout_s=600,
        )
        command = [sys.executable, __file__, "--stand-in-rank", str(dp_size)]
        ranks = [subprocess.Popen(command, env={**os.environ, **client.worker_env(r)}) for r in range(world_size)]
        try:
            await client.wait_ready(120)
            for step in range(1, options.rounds + 2):
                plan = plan_of(options, dp_size, len(completions), step)
                begin, busy = time.perf_counter(), time.thread_time()
                await client.prepare(plan, read)
                loop = time.thread_time() - busy
                answer = await client.step(step)
                if step > 1:  # the first round allocates
                    found["seconds"].append(time.perf_counter() - begin)
                    found["loop_seconds"].append(loop)
                    found["build_seconds"].append(answer.seconds)
            await client.stop()
        finally:
            client.close()
            for rank in ranks:
                rank.wait()
    return found


def sent_bytes(plan: StepPlan, completions: list[bytes]) -> int:
    """Bytes of all messages of a step's batch."""
    total = 0
    for part, numbers in zip(plan.ranks, plan.numbers):
        total += sum(map(len, messages.batch_frames(part, [completions[number] for number in numbers])))
    return total


def curve_seconds(size: int, rounds: int) -> list[float]:
    """One message of `size` bytes from one socket to another in this process, encrypted with CURVE."""
    server, client = zmq.Context(), zmq.Context()
    push, pull = server.socket(zmq.PUSH), client.socket(zmq.PULL)
    push.curve_server = True
    public, push.curve_secretkey = zmq.curve_keypair()
    push.curve_publickey = pull.curve_serverkey = public
    pull.curve_publickey, pull.curve_secretkey = zmq.curve_keypair()
    port = push.bind_to_random_port("tcp://127.0.0.1")
    pull.connect(f"tcp://127.0.0.1:{port}")
    data, seconds = os.urandom(size), []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        sending = threading.Thread(target=push.send, args=(data,), kwargs={"copy": False})
        sending.start()
        pull.recv(copy=False)
        seconds.append(time.perf_counter() - begin)
        sending.join()
    for context in (client, server):
        context.destroy(linger=0)
    return seconds[1:]


def copy_seconds(size: int, rounds: int) -> list[float]:
    """A copy of `size` bytes in memory."""
    source = np.frombuffer(os.urandom(size), np.uint8)
    target, seconds = np.empty_like(source), []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def main(options: argparse.Namespace) -> None:
    """Measure every layout and print."""
    count = max(1, options.tokens // options.completion)
    generator = np.random.default_rng(0)
    completions = [completion(options.completion, generator) for _ in range(count)]
    for name, (world_size, dp_size) in LAYOUTS.items():
        found = asyncio.run(measure(options, completions, world_size, dp_size))
        size = sent_bytes(plan_of(options, dp_size, count, 1), completions)
        median = {key: statistics.median(values) for key, values in found.items()}
        curve = statistics.median(curve_seconds(size, options.rounds))
        line = {
            "bench": "wire",
            "layout": name,
            "tokens": count * options.completion,
            "bytes_per_token": round(size / (count * options.completion), 3),
            "seconds": round(median["seconds"], 4),
            "spread": [round(min(found["seconds"]), 4), round(max(found["seconds"]), 4)],
            "loop_seconds": round(median["loop_seconds"], 5),
            "build_seconds": round(median["build_seconds"], 4),
            "curve_seconds": round(curve, 4),
            "copy_seconds": round(statistics.median(copy_seconds(size, options.rounds)), 4),
            "curve_over_ours": round(curve / median["seconds"], 3),
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if OPTIONS.stand_in_rank:
        stand_in_rank(OPTIONS.stand_in_rank)
    else:
        main(OPTIONS)

"""Tokens per second that go through one controller, with stand-ins for engines and trainer on the same machine.

    python tools/bench_controller.py [--engines 20] [--in-flight 2048] [--tokens 14336] [--seconds 60] [--json FILE]

The controller is the real one: client, decoder processes, sampler, verifier processes, stream, gate, journal,
packing, and the trainer's socket. Stand-ins, in processes of their own: the engines (tools/stand_in_engines.py) give
prepared responses of --tokens tokens after --delay seconds, the trainer's rank receives its batches and waits for
--step-seconds in a step. With the default delay the engines offer more than the controller takes, so its rate is its
limit.

Lag of the event loop: a timer every 5 ms; where the loop stands still, each tick that it missed counts with its own
delay. Figures are taken after --warm-up, over at least --seconds seconds from the end of a step to that of another: a
token counts when it was trained on. Targets: 400,000 tokens/s, a lag of 50 ms at p99. Prints one JSON line.
"""

import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import harness
from checkout import explained

parser = harness.benchmark(
    __doc__,
    engines=20,
    in_flight=(2048, "completions, rounded up to whole groups per engine"),
    tokens=(14336, "of a completion; at least 2,400"),
    delay=(30.0, "mean seconds of a completion"),
    warm_up=(60.0, "seconds before the measurement"),
    seconds=(60.0, "of the measurement"),
    decoders=(int, "rollouts.decoders"),
    groups_per_batch=16,
    step_seconds=(0.0, "of the stand-in trainer, for every step"),
)
TOKENS_PER_GPU = 1242
"""Tokens/s of a run (docs/measurements.md)."""

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS.parent / "tests"))

with explained():
    import psutil
    from fakes.sync import StandInProbe, StandInSync
    from process_figures import Lag, processor_s
    from rich.console import Console
    from stand_in_trainer import INFO

    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.controller.ledger import Ledger
    from megatron_scalerl.controller.loop import Controller
    from megatron_scalerl.controller.meter import Meter, metering
    from megatron_scalerl.controller.progress import Progress
    from megatron_scalerl.controller.run_folder import Resumed, RunFolder, resume_point
    from megatron_scalerl.distributed.rendezvous import private_folder
    from megatron_scalerl.engine.client import EngineClient
    from megatron_scalerl.engine.membership import Membership
    from megatron_scalerl.launch.hosts import allow_open_files
    from megatron_scalerl.launch.placement import Devices, Fleet
    from megatron_scalerl.processes.signals import SaveAndExit
    from megatron_scalerl.prompts.dataset import PromptSet
    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.rewards.pool import VerifierPool
    from megatron_scalerl.rollouts.decoder_pool import DecoderPool
    from megatron_scalerl.rollouts.history import read_history
    from megatron_scalerl.rollouts.plans import Plans
    from megatron_scalerl.rollouts.sampler import Sampler
    from megatron_scalerl.tiny.tokenizer import build_tokenizer
    from megatron_scalerl.trainer.client import TrainerClient
    from megatron_scalerl.types import Prompt

GROUP = 16
ANSWER_TOKENS = 2048


def recipe_for(folder, o):
    """The paper's lengths, or shorter ones, with enough groups for --in-flight."""
    per_engine = -(-o.in_flight // (o.engines * GROUP)) * GROUP
    groups = o.engines * per_engine // GROUP
    staleness = -(-groups // o.groups_per_batch)  # one batch more than the engines hold
    thinking = o.tokens - ANSWER_TOKENS
    return Recipe.model_validate(
        {
            "name": "run",
            "output_dir": str(folder),
            "steps": 10**6,
            "policy": {"path": str(folder / "policy")},
            "prompts": {"path": "none", "think_start": "<think>", "think_end": "</think>"},
            "rollouts": {
                "groups_per_batch": o.groups_per_batch,
                "group_size": GROUP,
                "max_staleness_steps": staleness,
                "max_in_flight": per_engine,
                "decoders": o.decoders,
            },
            "interruption": {"thinking_tokens": [thinking - 100, thinking], "answer_tokens": ANSWER_TOKENS},
            "rewards": {"verifier": "stand_in_engines:accept"},
            "engine": {"count": o.engines},
            "validation": {"every_steps": 0},
            "checkpoint": {"every_steps": 0},
            "weights": {"probe_every": 0},
        }
    )


def stand_in_engines(o, stack):
    """(addresses, process ids) of the engines, five in a process, until the stack is left."""
    servers = []
    for number in range(0, o.engines, 5):
        settings = {"engines": min(5, o.engines - number), "tokens": o.tokens, "delay": o.delay, "seed": number}
        settings["thinking"] = o.tokens - ANSWER_TOKENS - 200
        argv = [sys.executable, str(TOOLS / "stand_in_engines.py"), json.dumps(settings)]
        server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        servers.append(stack.enter_context(server))
    ports = [port for server in servers for port in json.loads(server.stdout.readline())]
    return [f"http://127.0.0.1:{port}" for port in ports], [server.pid for server in servers]


@contextlib.asynccontextmanager
async def trainer_of(folder, step_seconds):
    """(client, process id) of the stand-in rank."""
    with private_folder() as rendezvous, open(folder / "trainer.log", "wb") as log:
        client = TrainerClient(
            world_size=1, run_id="bench", incarnation="local.0", secret="bench", rendezvous=rendezvous
        )
        env = os.environ | client.worker_env(0) | {"MSRL_RECIPE": str(folder / "run" / "recipe.yaml")}
        argv = [sys.executable, str(TOOLS / "stand_in_trainer.py"), str(step_seconds)]
        with subprocess.Popen(argv, env=env, stdout=log, stderr=log) as rank:
            try:
                await client.wait_ready(120)
                yield client, rank.pid
            finally:
                client.close()
                rank.kill()


def prompts():
    """More prompts than a run draws."""
    created = (Prompt(prompt_id=f"p{i}", text=str(i), answer="0", token_ids=(1,) * 100) for i in range(10**5))
    return PromptSet(training=tuple(created), held_out=(), reports=())


async def elapse(running, seconds):
    """Wait, unless the controller ends; then for the end of a step."""
    await asyncio.wait({running.task}, timeout=seconds)
    running.sync.published.clear()
    published = asyncio.create_task(running.sync.published.wait())
    either = {running.task, published}
    done, _ = await asyncio.wait(either, timeout=max(10 * seconds, 60), return_when=asyncio.FIRST_COMPLETED)
    if published not in done:
        published.cancel()
        ended = f"the controller ended: {running.task.result()}" if done else "the controller made no step in time"
        raise RuntimeError(ended)


@contextlib.asynccontextmanager
async def controller_of(folder, recipe, o):
    """A controller at work on stand-ins until the block is left: its task, run folder, clients, sync, process ids."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    allow_open_files(recipe)
    async with contextlib.AsyncExitStack() as stack:
        run = stack.enter_context(contextlib.closing(RunFolder(recipe)))
        urls, engine_pids = stand_in_engines(o, stack)
        created = [EngineClient(url=url, secret="bench", name=f"engine-{index}") for index, url in enumerate(urls)]
        clients = [await stack.enter_async_context(client) for client in created]
        verifier = await stack.enter_async_context(VerifierPool(recipe.rewards))
        plans = Plans(recipe, tokenizer)
        decoders = await stack.enter_async_context(DecoderPool(recipe, tokenizer, plans, logs=folder))
        trainer, trainer_pid = await stack.enter_async_context(trainer_of(folder, o.step_seconds))
        start = resume_point(run.path)
        devices = Devices(unit="device_hours", trainer=1, engine=o.engines)
        ledger = Ledger(run.path / "ledger.jsonl", "device_hours", incarnation="local.0")
        stack.enter_context(contextlib.closing(ledger))
        meter = Meter(ledger, devices, start)
        await stack.enter_async_context(metering(meter))
        engines = Membership.of(clients, version=None)
        sync = StandInSync(engines)
        controller = Controller(
            recipe=recipe,
            prompts=prompts(),
            folder=run,
            fleet=Fleet(trainer=trainer, info=INFO, engines=engines, devices=devices),
            resumed=Resumed(start, read_history(run.path)),
            sampler=Sampler(plans, decoders=decoders, verifier=verifier),
            sync=sync,
            probe=StandInProbe(),
            meter=meter,
            progress=Progress(Console(file=open(os.devnull, "w")), recipe.steps),  # noqa: SIM115
            saving=SaveAndExit(),
        )
        task = asyncio.create_task(controller.run())
        pids = {"engines": engine_pids, "trainer": [trainer_pid], "decoders": decoders.pids}
        try:
            yield SimpleNamespace(task=task, folder=run.path, clients=clients, sync=sync, pids=pids)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def measure(folder, o):
    """Run the controller and observe it."""
    async with controller_of(folder, recipe_for(folder, o), o) as running:
        figures = await observe(running, o)
        rows = read_jsonl(running.folder / "metrics.jsonl")[-figures["steps"] :]
    waits = ("wait_for_batch_seconds", "send_seconds", "step_seconds")
    return figures | {name: statistics.fmean(row[name] for row in rows) for name in waits}


async def observe(running, o):
    """The figures between two steps that are at least --seconds apart, after --warm-up."""
    await elapse(running, o.warm_up)
    lag = Lag()
    watch = asyncio.create_task(lag.watch())
    pids = {"controller": [os.getpid()], **running.pids}
    clients = running.clients
    begin = time.monotonic()
    steps = running.sync.steps
    received = sum(c.received_tokens for c in clients)
    used = {name: processor_s(group) for name, group in pids.items()}
    await elapse(running, o.seconds)
    seconds = time.monotonic() - begin
    steps = running.sync.steps - steps
    used = {name: processor_s(group) - used[name] for name, group in pids.items()}
    received = sum(c.received_tokens for c in clients) - received
    watch.cancel()
    tokens = steps * o.groups_per_batch * GROUP * o.tokens
    peaks = {name: [harness.memory_of("VmHWM", pid) >> 20 for pid in group] for name, group in pids.items()}
    return {
        "tokens_per_s": round(tokens / seconds),
        "received_tokens_per_s": round(received / seconds),
        "lag_ms": {name: lag.within(share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
        "steps": steps,
        "processors": {name: value / seconds for name, value in used.items()},
        "processor_us_per_token": {name: 1e6 * value / tokens for name, value in used.items()},
        "peak_mib": {"controller": peaks["controller"][0], "a decoder": max(peaks["decoders"], default=0)},
        "sockets": len(psutil.Process().net_connections("all")),
        "requests": sum(c.in_flight for c in clients),
        "gpus": round(tokens / seconds / TOKENS_PER_GPU),
        "seconds": seconds,
    }


def main(o):
    """Measure and print."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), o))
    harness.report(o, figures)


if __name__ == "__main__":
    main(OPTIONS)

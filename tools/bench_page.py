"""Seconds and memory of `megatron-scalerl watch` on a large run, and the size of the page as one file.

    python tools/bench_page.py [--steps 1000] [--groups 10] [--group-size 10] [--tokens 400]

Writes a synthetic run with the journal, store, metrics and ledger of a real one, starts `watch` on it, and asks as a
browser does: the page, the groups of a step, a group, a completion. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
from checkout import explained

parser = harness.benchmark(
    __doc__,
    steps=1000,
    groups=(10, "groups of a step"),
    group_size=(10, "completions of a group"),
    tokens=(400, "tokens of a completion"),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take a second

with explained():
    import numpy as np
    from random_inputs import group_of, random_completion

    from megatron_scalerl.batching.rollout_bytes import write
    from megatron_scalerl.controller.ledger import Ledger
    from megatron_scalerl.controller.metrics import Metrics
    from megatron_scalerl.page.static_page import write_page
    from megatron_scalerl.rollouts.history import BatchRecord
    from megatron_scalerl.rollouts.journal import Journal
    from megatron_scalerl.tiny.tokenizer import TOKENS, save_tokenizer
    from megatron_scalerl.types import PassRate, Prompt, RolloutGroup

COLUMNS = (
    *("reward", "train_pass_rate", "entropy", "mismatch_mean", "truncated_share", "interrupted_share"),
    *("staleness_mean", "staleness_max", "generated_tokens_per_second", "step_seconds", "wait_for_batch_seconds"),
    *("pinned_seconds", "engine_paused_seconds", "engine_idle_seconds", "batch/groups", "batch/groups_kept"),
    *(f"weight_{phase}_seconds" for phase in ("pause", "start", "update", "finish", "verify", "resume")),
    *("loss", "grad_norm", "kl_k3", "ess", "send_seconds", "publish_seconds", "completion_tokens_mean"),
)


def group(number: int, version: int, options: argparse.Namespace, rng: Any) -> tuple[RolloutGroup, list[bytes]]:
    """A group of random completions, and their bytes."""
    size, ids = options.group_size, (6, len(TOKENS))
    arrays = [random_completion(rng, options.tokens, ids=ids, version=version, seed=seed) for seed in range(size)]
    prompt = Prompt(prompt_id=f"p{number}", text="", answer="4", token_ids=(1, 6, 16, 9, 3))
    made = group_of(number, prompt, arrays, (rng.random(size) < 0.5).tolist())
    return made, [write(each) for each in arrays]


async def fill_store(run: Path, options: argparse.Namespace) -> None:
    """Journal and store of all steps."""
    rng, journal = np.random.default_rng(0), Journal(run)
    for batch in range(options.steps):
        numbers = range(batch * options.groups, (batch + 1) * options.groups)
        await asyncio.gather(*(journal.finish(*group(number, batch, options, rng)) for number in numbers))
        await journal.batch(BatchRecord(batch=batch, step=batch + 1, policy_version=batch, group_ids=tuple(numbers)))
    await journal.close()


def fill_records(run: Path, options: argparse.Namespace) -> None:
    """Recipe, ledger, metrics, and a validation every tenth step."""
    save_tokenizer(run / "policy")
    recipe = {"name": "synthetic", "steps": options.steps + 200, "policy": {"path": str(run / "policy")}}
    (run / "recipe.yaml").write_text(json.dumps(recipe | {"forecast": {"fit_from_steps": 0, "fit_until_share": 0.5}}))
    rng, ledger = np.random.default_rng(1), Ledger(run / "ledger.jsonl", "device_hours", incarnation="local.0")
    metrics = Metrics(run, "synthetic", step=0, batches=0, last_step=0)
    for step in range(options.steps + 1):
        if step:
            for phase in ("produce", "train"):
                devices = [("engine", 1.0), ("trainer", 1.0)]
                ledger.charge(batch=step, step=step, phase=phase, seconds=5.0, devices=devices)
            metrics.step(step, {"batches": step, **dict(zip(COLUMNS, rng.random(len(COLUMNS)).tolist()))})
        if step % 10 == 0:
            rate = 0.36 + 0.5 * step / (step + 200) + 0.01 * float(rng.standard_normal())
            metrics.validation(validation(step, rate, ledger.axis_at(step)), [rate] * 120)
    metrics.close()
    ledger.close()


def validation(step: int, rate: float, hours: float) -> PassRate:
    """One row of validation.jsonl."""
    return PassRate(
        step=step,
        policy_version=step,
        pass_rate=rate,
        prompts=120,
        generations=1,
        compute=hours,
        compute_total=hours,
        unit="device_hours",
        truncated_share=0.0,
        interrupted_share=0.0,
        mean_completion_tokens=30.0,
    )


@contextmanager
def watching(folder: Path) -> Iterator[tuple[Callable[..., tuple[bytes, float]], dict[str, Any]]]:
    """`watch` on a folder: (path and query -> a response and its seconds, its figures).

    The figures are the seconds until it prints its address, and at the end its peak memory.
    """
    begin = time.perf_counter()
    command = [sys.executable, "-m", "megatron_scalerl", "watch", str(folder)]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    try:
        assert watch.stdout is not None
        base, token = watch.stdout.readline().strip().split("?")
        found = {"start_seconds": time.perf_counter() - begin}

        def asked(path: str = "", query: str = "") -> tuple[bytes, float]:
            sent = time.perf_counter()
            with urllib.request.urlopen(f"{base}{path}?{query}{'&' if query else ''}{token}") as answer:
                return answer.read(), time.perf_counter() - sent

        yield asked, found
        found["peak_mib"] = harness.memory_of("VmHWM", watch.pid) / 2**20
    finally:
        watch.terminate()
        watch.wait()


def measured(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a run that is written to `run`."""
    asyncio.run(fill_store(run, options))
    fill_records(run, options)
    last = (options.steps - 1) * options.groups
    wanted = {"page": (), "groups": ("api/groups", f"step={options.steps}"), "group": ("api/group", f"id={last}")}
    wanted |= {"completion": ("api/completion", f"id={last}&index=0")}
    with watching(run) as (asked, found):
        for name, words in wanted.items():
            text, found[f"{name}_seconds"] = asked(*words)
            found[f"{name}_bytes"] = len(text)
    return found | {
        "file_seconds": harness.seconds_of(lambda: write_page(run, run / "page.html")),
        "file_bytes": (run / "page.html").stat().st_size,
        "store_bytes": sum(path.stat().st_size for path in (run / "rollouts").iterdir()),
    }


def main(options: argparse.Namespace) -> None:
    """Print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), options)
    harness.report(options, {**harness.asked(options), **found, "machine": harness.machine()})


if __name__ == "__main__":
    main(OPTIONS)

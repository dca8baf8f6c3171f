"""Seconds and memory of `megatron-scalerl watch` on a large run, and the size of the page as one file.

    python tools/bench_page.py [--steps 1000] [--groups 10] [--group-size 10] [--tokens 400] [--keep FOLDER]

Writes a synthetic run with the journal, store, metrics and ledger of a real one, starts `watch` on it, and asks as a
browser does: the page, the groups of a step, a group, a completion. Prints one JSON line. --keep leaves the run in a
new folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--groups", type=int, default=10, help="groups of a step")
    p.add_argument("--group-size", type=int, default=10, help="completions of a group")
    p.add_argument("--tokens", type=int, default=400, help="tokens of a completion")
    p.add_argument("--keep", type=Path, metavar="FOLDER", help="write the run here and keep it")
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take a second

with explained():
    import numpy as np

    from megatron_scalerl.batching.rollout_bytes import RolloutArrays, facts_of, write
    from megatron_scalerl.controller.ledger import Ledger
    from megatron_scalerl.controller.metrics import Metrics
    from megatron_scalerl.page.static_page import write_page
    from megatron_scalerl.rollouts.history import BatchRecord
    from megatron_scalerl.rollouts.journal import Journal
    from megatron_scalerl.tiny.tokenizer import TOKENS, save_tokenizer
    from megatron_scalerl.types import PassRate, Prompt, RolloutGroup, Score

COLUMNS = (
    *("reward", "train_pass_rate", "entropy", "mismatch_mean", "truncated_share", "interrupted_share"),
    *("staleness_mean", "staleness_max", "generated_tokens_per_second", "step_seconds", "wait_for_batch_seconds"),
    *("pinned_seconds", "engine_paused_seconds", "engine_idle_seconds", "batch/groups", "batch/groups_kept"),
    *(f"weight_{phase}_seconds" for phase in ("pause", "start", "update", "finish", "verify", "resume")),
    *("loss", "grad_norm", "kl_k3", "ess", "send_seconds", "publish_seconds", "completion_tokens_mean"),
)


def group(number: int, version: int, options: argparse.Namespace, rng: Any) -> tuple[RolloutGroup, list[bytes]]:
    """A group of random completions, and their bytes."""
    size, length = options.group_size, options.tokens
    arrays = [
        RolloutArrays(
            token_ids=rng.integers(6, len(TOKENS), length).astype("<u4"),
            rollout_logprobs=-rng.exponential(0.3, length).astype("<f4"),
            policy_versions=np.full(length, version),
            loss_mask=np.ones(length, dtype=bool),
            interrupted=False,
            truncated=False,
            thinking_cut=0,
            seed=seed,
        )
        for seed in range(size)
    ]
    right = rng.random(size) < 0.5
    made = RolloutGroup(
        group_id=number,
        prompt=Prompt(prompt_id=f"p{number}", text="", answer="4", token_ids=(1, 6, 16, 9, 3)),
        completions=tuple(map(facts_of, arrays)),
        positions=tuple(range(size)),
        scores=tuple(Score(correct=bool(each), reward=1.0 if each else -1.0) for each in right),
        first_token_version=version,
        epoch=0,
    )
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


def served(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the start of `watch` to its address, of each request, and its peak memory."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "megatron_scalerl", "watch", str(run)]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    try:
        assert watch.stdout is not None
        base, token = watch.stdout.readline().strip().split("?")
        found: dict[str, Any] = {"start_seconds": time.perf_counter() - begin}
        last = (options.steps - 1) * options.groups
        asked = {"page": "", "groups": f"api/groups?step={options.steps}&", "group": f"api/group?id={last}&"}
        asked |= {"completion": f"api/completion?id={last}&index=0&"}
        for name, path in asked.items():
            begin = time.perf_counter()
            with urllib.request.urlopen(f"{base}{path or '?'}{token}") as answer:
                found[f"{name}_bytes"] = len(answer.read())
            found[f"{name}_seconds"] = time.perf_counter() - begin
        status = Path(f"/proc/{watch.pid}/status").read_text()
        return found | {"peak_mib": int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024}
    finally:
        watch.terminate()
        watch.wait()


def measured(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a run that is written to `run`."""
    asyncio.run(fill_store(run, options))
    fill_records(run, options)
    found = served(run, options)
    begin = time.perf_counter()
    write_page(run, run / "page.html")
    return found | {
        "file_seconds": time.perf_counter() - begin,
        "file_bytes": (run / "page.html").stat().st_size,
        "store_bytes": sum(path.stat().st_size for path in (run / "rollouts").iterdir()),
    }


def main(options: argparse.Namespace) -> None:
    """Print one JSON line."""
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        found = measured(options.keep, options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(Path(folder), options)
    sizes = {name: getattr(options, name) for name in ("steps", "groups", "group_size", "tokens")}
    print(json.dumps({**sizes, **found, "machine": {"cores": os.cpu_count(), "python": platform.python_version()}}))


if __name__ == "__main__":
    main(OPTIONS)

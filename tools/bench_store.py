"""Tokens per second into the rollout store, the event loop's lag meanwhile, and seconds until a restart can replay.

    python tools/bench_store.py [--batches 10] [--groups 48] [--group-size 16] [--tokens 14000] [--ready 9]

A real journal and store in a folder of --folder, which needs --batches + --ready times the tokens of a batch times
8 bytes. All groups of a batch finish at once. Then another process reads the journal, the headers of the groups of
--ready batches that were in none yet, and the completions of the last batch as they are sent to the trainer. The page
cache is warm. Prints one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import harness
from checkout import explained

parser = harness.benchmark(
    __doc__,
    batches=10,
    groups=(48, "groups of a batch"),
    group_size=16,
    tokens=(14_000, "tokens of a completion"),
    ready=(9, "batches of finished groups that are in no batch yet"),
    folder=(str, "where the store is written, by default the temporary folder"),
    replay=(Path, argparse.SUPPRESS),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take a second

with explained():
    import numpy as np
    from process_figures import Lag
    from random_inputs import group_of, random_completion

    from megatron_scalerl.batching.rollout_bytes import write
    from megatron_scalerl.rollouts.completions import completions_of
    from megatron_scalerl.rollouts.history import BatchRecord, check_groups, read_batch, read_groups, read_history
    from megatron_scalerl.rollouts.journal import Journal
    from megatron_scalerl.types import Prompt

LAG_S = 0.001
"""Period of the timer whose lateness is the event loop's lag."""


def make_group(number, completions):
    """A group of these completions."""
    prompt = Prompt(prompt_id=f"{number:064x}", text="x" * 400, answer="1", token_ids=tuple(range(1000, 1250)))
    return group_of(number, prompt, completions, [i % 2 == 0 for i in range(len(completions))])


async def fill(run, options):
    """Write all batches and the groups of --ready more."""
    arrays = [random_completion(np.random.default_rng(0), options.tokens)] * options.group_size
    data = [write(arrays[0])] * options.group_size
    journal = Journal(run)
    lag = Lag(tick_s=LAG_S)
    timer = asyncio.create_task(lag.watch())
    begin = time.perf_counter()
    for batch in range(options.batches + options.ready):
        numbers = range(batch * options.groups, (batch + 1) * options.groups)
        for number in numbers:
            journal.admit(number, f"{number:064x}", 0)
        await asyncio.gather(*(journal.finish(make_group(number, arrays), data) for number in numbers))
        if batch < options.batches:
            record = BatchRecord(batch=batch, step=batch + 1, policy_version=batch, group_ids=tuple(numbers))
            await journal.batch(record)
    seconds = time.perf_counter() - begin
    timer.cancel()
    await journal.close()
    tokens = (options.batches + options.ready) * options.groups * options.group_size * options.tokens
    size = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
    return {
        "tokens_per_second": tokens / seconds,
        "bytes_per_token": size / tokens,
        "lag_p99_seconds": lag.within(0.99) / 1000,
        "lag_max_seconds": lag.within(1.0) / 1000,
    }


async def replay(run):
    """What a start reads before its first step."""
    begin = time.perf_counter()
    history = read_history(run)
    check_groups(run, history, len(history.batches) - 1)
    ready = read_groups(run, history, history.unbatched())
    groups = read_batch(run, history, history.batches[-1])
    read = time.perf_counter()
    sources = [(group.stored, position) for group in groups for position in group.positions]
    sent = await completions_of(run, sources)(range(len(sources)))
    return {
        "ready_groups": len(ready),
        "replay_ready_seconds": read - begin,
        "batch_read_seconds": time.perf_counter() - read,
        "batch_bytes": sum(map(len, sent)),
        "peak_mib": harness.memory_of("VmHWM") / 2**20,
    }


def main(options):
    """Write in this process, read in another, print one JSON line."""
    if options.replay is not None:
        print(json.dumps(asyncio.run(replay(options.replay))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = asyncio.run(fill(Path(folder), options))
        figures |= harness.child(__file__, "--replay", folder)
    harness.report(options, figures)


if __name__ == "__main__":
    main(OPTIONS)

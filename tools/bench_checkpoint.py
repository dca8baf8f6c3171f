"""For how long a checkpoint stops the trainer: written at once, and from a copy during the next steps.

    python tools/bench_checkpoint.py [--rounds 5] [--samples 8] [--threads 1] [--folder FOLDER]

One rank trains in bf16 with fp32 main weights. A round saves at once, saves asynchronously and makes steps until that
checkpoint can be committed, and makes as many steps beside nothing. `copy` is one copy of as many bytes as the
checkpoint has, into memory that is there: the bound. The policy is a Llama of 134M parameters with random weights;
--folder is on the disk to write to. Prints one JSON line with medians of the rounds.
"""

import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import harness
from checkout import explained
from harness import seconds_of

parser = harness.benchmark(
    __doc__,
    rounds=5,
    samples=8,
    threads=1,
    toy=(False, "a policy of two narrow layers"),
    folder=(str, "where checkpoints are written; without it a temporary folder"),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import torch
    from random_inputs import LLAMA_134M, random_llama, random_samples, recipe_of

    from megatron_scalerl.batching.packing import pack
    from megatron_scalerl.processes.child_process import end_with
    from megatron_scalerl.trainer.checkpoint import begin_save, save
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer


TOY = LLAMA_134M | dict(hidden=96, inner=128, layers=2)


def one_step(trainer, samples):
    """The next optimizer step, on random tokens."""
    step = trainer.steps_made + 1
    packing = dict(dp_size=1, micro_batch_tokens=1024, pad_multiple=1, policy_version=step - 1)
    [batch] = pack(samples, step=step, **packing)
    trainer.step(batch)


def size_of(trainer, folder):
    """Bytes of the files that ranks write for a checkpoint."""
    path = folder / "step_000000"
    save(path, trainer, {})
    size = sum(file.stat().st_size for file in path.glob("*.distcp"))
    shutil.rmtree(path)
    return size


def one_round(trainer, step, folder, copy):
    """Seconds of one round's parts, and `steps`: how many it made beside the writing."""
    at_once = folder / "step_000001"
    later = folder / "step_000002"
    figures = {"at_once": seconds_of(lambda: save(at_once, trainer, {})), "copy": seconds_of(copy)}
    begin = time.perf_counter()
    saving = begin_save(later, trainer, {})
    figures["copied"] = time.perf_counter() - begin
    while_written = []
    committed = None
    waited = 0.0
    while committed is None:
        while_written.append(seconds_of(step))
        begin = time.perf_counter()
        committed = saving.finish(wait=False)
        waited += time.perf_counter() - begin
    figures |= {"stopped": figures["copied"] + waited, "written": committed, "steps": float(len(while_written))}
    figures["step_beside"] = statistics.mean(while_written)
    figures["step_alone"] = statistics.mean(seconds_of(step) for _ in while_written)
    for path in (at_once, later):
        shutil.rmtree(path)
    return figures


def measure(options, policy, folder):
    """Medians over the rounds."""
    recipe = recipe_of(
        policy,
        dtype="bfloat16",
        optimizer={"lr": 1e-5, "warmup_steps": 0},
        trainer={"threads": options.threads, "micro_batch_tokens": 1024},
    )
    trainer = make_trainer(recipe, init_parallel(recipe))
    step = partial(one_step, trainer, random_samples(options.samples, (24, 88), LLAMA_134M["vocab"]))
    step()  # makes the optimizer's state
    size = size_of(trainer, folder)
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8)
    arm = partial(one_round, trainer, step, folder, lambda: target.copy_(source))
    rounds = harness.columns(harness.in_rounds({"checkpoint": arm}, options.rounds)["checkpoint"])
    figures = harness.medians(rounds)
    return {
        "stopped_over_at_once": figures["stopped"] / figures["at_once"],
        "stopped_over_copy": figures["stopped"] / figures["copy"],
        "step_beside_over_alone": figures["step_beside"] / figures["step_alone"],
        "bytes": size,
        **figures,
        "spread": harness.extremes(rounds),
    }


def main(options):
    """Measure and print."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        policy = random_llama(Path(folder) / "policy", **(TOY if options.toy else LLAMA_134M))
        harness.report(options, measure(options, policy, Path(folder)))


if __name__ == "__main__":
    end_with(partial(main, OPTIONS))

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


class Steps:
    """Optimizer steps on batches of random tokens."""

    def __init__(self, trainer, samples):
        self._trainer = trainer
        self._samples = random_samples(samples, (24, 88), LLAMA_134M["vocab"])

    def one(self):
        """Make the next step."""
        step = self._trainer.steps_made + 1
        [batch] = pack(
            self._samples, step=step, dp_size=1, micro_batch_tokens=1024, pad_multiple=1, policy_version=step - 1
        )
        self._trainer.step(batch)


def size_of(trainer, folder):
    """Bytes of the files that ranks write for a checkpoint."""
    path = folder / "step_000000"
    save(path, trainer, {})
    size = sum(file.stat().st_size for file in path.glob("*.distcp"))
    shutil.rmtree(path)
    return size


def one_round(trainer, steps, folder, copy):
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
        while_written.append(seconds_of(steps.one))
        begin = time.perf_counter()
        committed = saving.finish(wait=False)
        waited += time.perf_counter() - begin
    figures |= {"stopped": figures["copied"] + waited, "written": committed, "steps": float(len(while_written))}
    figures["step_beside"] = statistics.mean(while_written)
    figures["step_alone"] = statistics.mean(seconds_of(steps.one) for _ in while_written)
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
    steps = Steps(trainer, options.samples)
    steps.one()  # makes the optimizer's state
    size = size_of(trainer, folder)
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8)
    arm = partial(one_round, trainer, steps, folder, lambda: target.copy_(source))
    rounds = harness.columns(harness.in_rounds({"checkpoint": arm}, options.rounds)["checkpoint"])
    figures = harness.medians(rounds)
    return {
        "bench": "checkpoint",
        "stopped_over_at_once": round(figures["stopped"] / figures["at_once"], 4),
        "stopped_over_copy": round(figures["stopped"] / figures["copy"], 3),
        "step_beside_over_alone": round(figures["step_beside"] / figures["step_alone"], 3),
        "bytes": size,
        **harness.rounded(figures),
        "spread": harness.extremes(rounds),
        **harness.asked(options, "rounds", "threads"),
        "machine": harness.machine(),
    }


def main(options):
    """Measure and print."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        policy = random_llama(Path(folder) / "policy", **(TOY if options.toy else LLAMA_134M))
        harness.report(options, measure(options, policy, Path(folder)))


if __name__ == "__main__":
    end_with(partial(main, OPTIONS))

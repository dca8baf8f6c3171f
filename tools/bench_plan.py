"""Compares the planner's memory model and simulation with real runs on this machine.

    python tools/bench_plan.py memory [--only NAME]
    python tools/bench_plan.py queue --tiny runs/tiny_1 [--steps 24]

`memory` trains random policies of 22 and 35 million parameters for two steps, each in a separate process, and
compares the plan's figure with the peak resident memory above that before the model was built. Large blocks are
returned to the system when they are freed (MALLOC_MMAP_THRESHOLD_), as a GPU's allocator would reuse them; with
glibc's default threshold, its fragmentation would be measured instead of the model.

`queue` runs recipes/tiny_cpu.yaml synchronously (k = 0), measures generation speed, step time, weight publication and
lengths, predicts the run at k = 8, executes that run and compares. A second comparison uses the trainer seconds of
the k = 8 run, which shares its cores with an engine. `tiny` is a folder made by examples/quickstart.sh.
Prints one JSON line per comparison.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import harness
from checkout import explained
from tiny_run import tiny_run

MIB = 2**20
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "dense-fp32": {"policy": "dense", "dtype": "float32", "tokens": 2048},
    "dense-fp32-recompute": {"policy": "dense", "dtype": "float32", "tokens": 4096, "model": FULL},
    "dense-bf16": {"policy": "dense", "dtype": "bfloat16", "tokens": 4096},
    "dense-bf16-selective": {
        "policy": "dense",
        "dtype": "bfloat16",
        "tokens": 2048,
        "model": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]},
    },
    "moe-fp32": {"policy": "moe", "dtype": "float32", "tokens": 2048},
    "moe-bf16": {"policy": "moe", "dtype": "bfloat16", "tokens": 1024},
}
"""Name -> policy, type, micro_batch_tokens and megatron.model."""
SEQUENCE = 512
VOCABULARY = 8192
WAIT = "wait_for_batch_seconds"
MEASURED = ("step_seconds", "train_seconds", WAIT, "engine_paused_seconds")
FIXED_OVER_PER_COMPLETION = 13.0
"""Of one decoding step of the tiny policy: 105 tok/s with one completion, 1,400 with 128, one thread."""


def parser():
    """The options."""
    p = harness.benchmark(
        __doc__,
        only=([None, *CASES], "memory: one configuration"),
        tiny=(Path("runs/tiny_1"), "queue: folder with a warm policy"),
        steps=24,
        skip=(10, "queue: steps left out, the pipeline fills"),
        case=(str, argparse.SUPPRESS),
    )()
    p.add_argument("what", choices=("memory", "queue", "rank"))
    return p


def main():
    """Compare and print."""
    o = parser().parse_args()
    if o.what == "rank":
        print(json.dumps(measure_rank(json.loads(o.case))))
    elif o.what == "queue":
        harness.report(o, compare_queue(o))
    else:
        for name in [o.only] if o.only else list(CASES):
            harness.report(o, compare_memory(name))


ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
ALONE |= {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Environment of the measured process."""


def compare_memory(name):
    """One configuration: predicted and measured peak above the idle process, bytes."""
    with tempfile.TemporaryDirectory() as folder:
        case = CASES[name] | {"path": folder}
        write_policy(case["policy"], folder)
        measured = harness.child(__file__, "rank", "--case", json.dumps(case), **ALONE)
        terms, parameters = predicted(case)
    total = sum(terms.values())
    return {
        "case": name,
        "parameters": parameters,
        "micro_batch_tokens": case["tokens"],
        "predicted_mib": round(total / MIB),
        "measured_mib": round(measured["peak_above_idle"] / MIB),
        "ratio": total / measured["peak_above_idle"],
        "idle_mib": round(measured["idle"] / MIB),
        "terms_mib": {term: size / MIB for term, size in terms.items()},
    }


def write_policy(kind, folder):
    """A random policy: dense Llama of 22 million parameters, or Llama 4 with 4 experts of 35 million."""
    from random_inputs import random_model

    sizes = {"dense": dict(inner=1024, layers=10), "moe": dict(inner=768, layers=6, num_local_experts=4)}[kind]
    common = dict(vocab=VOCABULARY, hidden=384, heads=6, groups=2, head_dim=64, max_position_embeddings=4096)
    random_model(kind, **common, **sizes).save_pretrained(folder)


def case_recipe(case):
    """The recipe of one configuration."""
    from random_inputs import recipe_of

    trainer = {"micro_batch_tokens": case["tokens"]}
    model = {"model": case.get("model", {})}
    return recipe_of(case["path"], dtype=case["dtype"], steps=2, trainer=trainer, megatron=model)


def predicted(case):
    """(the plan's terms, bytes, with the kernels of this machine; parameters)."""
    from predicted_trainer import predict_trainer

    found = predict_trainer(case_recipe(case), case["path"], layers="plain", device="cpu", sequence_tokens=SEQUENCE)
    return {term.name: term.bytes for term in found.terms}, found.parameters


def measure_rank(case):
    """Two optimizer steps on two full micro-batches; resident memory before, and its peak above that."""
    import gc

    from random_inputs import random_samples

    from megatron_scalerl.batching.packing import pack
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer

    recipe = case_recipe(case)
    parallel = init_parallel(recipe)
    samples = random_samples(2 * case["tokens"] // SEQUENCE, (SEQUENCE, SEQUENCE), VOCABULARY, share=4, logprob=-11)
    [batch] = pack(samples, step=1, dp_size=1, micro_batch_tokens=case["tokens"], pad_multiple=1, policy_version=0)
    gc.collect()
    idle = harness.memory_of("VmRSS")
    harness.reset_peak()
    trainer = make_trainer(recipe, parallel)
    for step in (1, 2):
        trainer.step(replace(batch, step=step))
    return {"idle": idle, "peak_above_idle": harness.memory_of("VmHWM") - idle}


def compare_queue(o):
    """Predict the run at k = 8 from the run at k = 0, make it, compare."""
    from megatron_scalerl.plan.work import Lengths

    rows, tokens = train(o, 0)
    real, real_tokens = train(o, 8)
    setting = queue_setting(Lengths(tuple(tokens)), rows, o)
    queue = setting(per_completion(setting, mean_of(rows, WAIT)), 8)
    busy = {
        "train_seconds": mean_of(real, "train_seconds"),
        "publish_seconds": mean_of(real, "engine_paused_seconds"),
    }
    steps_per_hour = 3600 / mean_of(real, "step_seconds")
    measured = {"steps_per_hour": steps_per_hour, "staleness": mean_of(real, "staleness_mean")}
    measured["trainer_waits"] = mean_of(real, WAIT) / mean_of(real, "step_seconds")
    return {
        "measured": measured,
        "predicted": predicted_queue(queue, steps_per_hour),
        "with_its_train_seconds": predicted_queue(replace(queue, **busy), steps_per_hour),
        "k0": {key: mean_of(rows, key) for key in MEASURED},
        "k8": {key: mean_of(real, key) for key in MEASURED},
        "mean_tokens": [statistics.fmean(t) for t in (tokens, real_tokens)],
        "steps": len(real),
    }


def predicted_queue(queue, steps_per_hour):
    """The simulation's figures, and its speed over the measured one."""
    from megatron_scalerl.plan.simulate import simulate

    timing = simulate(queue)
    figures = {"steps_per_hour": timing.steps_per_hour, "ratio": timing.steps_per_hour / steps_per_hour}
    figures |= {"trainer_waits": timing.trainer_waits, "staleness": timing.staleness_mean}
    return figures


def mean_of(rows, key):
    """Mean of a column of the metrics."""
    return statistics.fmean(row[key] for row in rows)


def queue_setting(lengths, rows, o):
    """(seconds a completion adds to a decoding step, k) -> the simulation's setting, the rest as measured."""
    from megatron_scalerl.plan.engine import Decoding
    from megatron_scalerl.plan.simulate import QueueSettings
    from megatron_scalerl.recipe.file import load_recipe

    recipe = load_recipe("recipes/tiny_cpu.yaml")
    train_ = mean_of(rows, "train_seconds")
    publish = mean_of(rows, "engine_paused_seconds")
    other = max(0.0, mean_of(rows, "step_seconds") - train_ - publish - mean_of(rows, WAIT))
    running = min(recipe.engine.vllm["max_num_seqs"], recipe.rollouts.max_in_flight)

    def setting(per, k):
        speed = Decoding(
            fixed_seconds=FIXED_OVER_PER_COMPLETION * per,
            per_completion_seconds=per,
            prefill_seconds=0.0,
            running=running,
        )
        return QueueSettings(
            rollouts=recipe.rollouts.model_copy(update={"max_staleness_steps": k}),
            engines=1,
            decoding=speed,
            lengths=lengths,
            train_seconds=train_,
            publish_seconds=publish,
            other_seconds=other,
            steps=o.steps,
            warm_up=o.skip,
        )

    return setting


def per_completion(setting, waited):
    """The speed at which the simulated synchronous run waits as long for a batch as the real one did."""
    from megatron_scalerl.plan.simulate import simulate

    low = 1e-6
    high = 1.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        timing = simulate(setting(middle, 0))
        low, high = (middle, high) if timing.trainer_waits * timing.step_seconds < waited else (low, middle)
    return (low * high) ** 0.5


def train(o, k):
    """(metrics by step after --skip ones, completion lengths) of one real run without validations."""
    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.rollouts.history import read_batch, read_history

    with tiny_run(o.tiny, o.steps, f"rollouts.max_staleness_steps={k}") as run:
        rows = read_jsonl(run / "metrics.jsonl")
        history = read_history(run)
        groups = [group for record in history.batches for group in read_batch(run, history, record)]
    return rows[o.skip :], [facts.tokens for group in groups for facts in group.completions]


if __name__ == "__main__":
    with explained():
        from megatron_scalerl.processes.child_process import end_with
    end_with(explained()(main))

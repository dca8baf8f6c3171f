"""A step of this product beside a step of TRL's GRPOTrainer: the same policy, prompts, reward, batch.

    python tools/bench_peer.py RECIPE [--peer-python PYTHON] [--rounds 3] [--steps 4] [key=value ...]

RECIPE is one that `init` wrote for CPUs, with rows of text and `math`; settings go to the product alone. PYTHON has
TRL and the packages that `math` needs; without it the product is measured alone. Both train --steps steps from the
recipe's policy, in turns, in float32 with CISPO, with its lengths and learning rate, without validation, and with
groups of equal rewards kept, as TRL does. The first step of each run is left out: the product's waits for its first
completions. TRL samples by transformers, as its documentation has it for a CPU. Prints seconds a step, processor
seconds a step, sampled tokens a second, the peak memory of all processes of an arm, and the ratios, as one JSON line.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import harness
from checkout import explained

with explained():
    import psutil
    import yaml

    from megatron_scalerl.checkpoints.jsonl import read_jsonl


options = harness.benchmark(
    __doc__,
    peer_python=(str, "has TRL"),
    rounds=3,
    steps=4,
    micro_batch=(16, "completions of a forward pass of TRL"),
    peer=(Path, argparse.SUPPRESS),  # this process is the peer
)


def parser():
    """The options, a recipe and its settings."""
    built = options()
    built.add_argument("recipe", type=Path, metavar="RECIPE")
    built.add_argument("settings", nargs="*", metavar="key=value", help="settings of the product's recipe")
    return built


def train_peer(recipe, steps, micro_batch, out):
    """Train with TRL, and write each step's seconds, tokens and reward to `out` as JSON lines."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megatron_scalerl.rewards.math import verify_math

    prompts = recipe["prompts"]
    system = [{"role": "system", "content": text} for text in [prompts.get("system")] if text]
    rows = [json.loads(line) for line in Path(prompts["path"]).read_text().splitlines()]
    asked = [[*system, {"role": "user", "content": row["prompt"]}] for row in rows]
    data = Dataset.from_dict({"prompt": asked, "answer": [row["answer"] for row in rows]})

    def reward(completions, answer, **_):
        texts = [completion[0]["content"] for completion in completions]
        return [1.0 if verify_math(text, right, {}) else -1.0 for text, right in zip(texts, answer, strict=True)]

    class StepLog(TrainerCallback):
        began = time.perf_counter()

        def on_log(self, arguments, state, control, logs=None, **_):
            if logs is None or "completions/mean_length" not in logs:
                return
            now = time.perf_counter()
            line = {"step_seconds": now - self.began, "train_completions": groups * size, "reward": logs["reward"]}
            line["completion_tokens_mean"] = logs["completions/mean_length"]
            self.began = now
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    groups = recipe["rollouts"]["groups_per_batch"]
    size = recipe["rollouts"]["group_size"]
    settings = GRPOConfig(
        output_dir=str(out.parent / "trl"),
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=groups * size // micro_batch,
        num_generations=size,
        max_completion_length=max(recipe["interruption"]["thinking_tokens"])
        + recipe["interruption"]["answer_tokens"],
        temperature=recipe["rollouts"]["temperature"],
        learning_rate=recipe["optimizer"]["lr"],
        lr_scheduler_type="constant",
        loss_type="cispo",
        epsilon_high=5.0,
        beta=0.0,
        scale_rewards="batch",
        mask_truncated_completions=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(recipe["policy"]["path"], reward, settings, train_dataset=data, callbacks=[StepLog()])
    trainer.train()


def watched(command, log, steps):
    """Run a command that adds a line to the file `log` after each step.

    Processor seconds a step of its process tree, from the first line to the last one, and the tree's peak memory
    (bytes, shared pages counted once).
    """
    busy = {}  # processor seconds by process, the ended ones among them
    at_line = {}  # their sum when the log had so many lines
    peak = 0
    checkout = {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | checkout)
    try:
        while process.poll() is None:
            memory = 0
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = member.cpu_times()
                    memory += member.memory_full_info().pss
                    busy[member.pid] = times.user + times.system
            peak = max(peak, memory)
            if rows := read_jsonl(log):
                at_line.setdefault(len(rows), sum(busy.values()))
            time.sleep(0.5)
    finally:
        with contextlib.suppress(psutil.Error):
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}")
    at_line.setdefault(steps, sum(busy.values()))
    first = min(at_line)
    if first == steps:
        raise RuntimeError("the steps were too short to be told apart; take more --steps")
    return (at_line[steps] - at_line[first]) / (steps - first), peak


def command_of(arm, o, folder):
    """(an arm's command, the log to which it adds a line after each step)."""
    if arm == "trl":
        log = folder / "peer.jsonl"
        words = [str(o.recipe), "--steps", str(o.steps), "--micro-batch", str(o.micro_batch), "--peer", str(log)]
        return [o.peer_python, __file__, *words], log
    words = [f"steps={o.steps}", f"output_dir={folder}", "name=run", "validation.every_steps=0"]
    words += ["filters.zero_variance=false", f"checkpoint.every_steps={10 * o.steps}", *o.settings]
    command = [sys.executable, "-m", "megatron_scalerl", "train", str(o.recipe), *words]
    return command, folder / "run" / "metrics.jsonl"


def measured(arm, o):
    """The figures of one run of an arm, without its first step."""
    with tempfile.TemporaryDirectory() as folder:
        command, log = command_of(arm, o, Path(folder))
        busy, peak = watched(command, log, o.steps)
        lines = read_jsonl(log)[1:]
    seconds = sum(line["step_seconds"] for line in lines)
    return {
        "step_s": seconds / len(lines),
        "tokens_per_s": sum(line["train_completions"] * line["completion_tokens_mean"] for line in lines) / seconds,
        "step_processor_s": busy,
        "peak_gib": peak / 2**30,
    }


def main(o):
    """Run the arms in turns and print their medians. Raises SystemExit for arms that would differ."""
    if o.peer:
        return train_peer(yaml.safe_load(o.recipe.read_text()), o.steps, o.micro_batch, o.peer)
    rollouts = yaml.safe_load(o.recipe.read_text())["rollouts"]
    if o.peer_python and (rollouts["groups_per_batch"] * rollouts["group_size"] % o.micro_batch or o.settings):
        raise SystemExit("beside a peer --micro-batch divides the batch, and settings stand in the recipe")
    arms = ["product", "trl"] if o.peer_python else ["product"]
    runs = harness.in_rounds({arm: partial(measured, arm, o) for arm in arms}, o.rounds, warm_up=0)
    columns = {arm: harness.columns(rows) for arm, rows in runs.items()}
    line = {}
    for arm, found in columns.items():
        line[arm] = harness.medians(found)
    if o.peer_python:
        ratios = harness.paired(columns["product"]["tokens_per_s"], columns["trl"]["tokens_per_s"])
        line["tokens_per_s_ratio"] = harness.spread(ratios)
    harness.report(o, line)
    return None


if __name__ == "__main__":
    main(parser().parse_args())

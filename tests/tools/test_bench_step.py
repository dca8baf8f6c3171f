"""The bench prints one line with both sides and the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_step.py"


SET_CLOCK = """
import sys
sys.path.insert(0, "tools")
import bench_step as bench

readings = {
    "ours": [(90, 9), (90, 9), (1, 1), (2, 1), (6, 5)],
    "bare": [(80, 9), (80, 9), (3, 4), (4, 4), (9, 8)],
    "packed": [(70, 9), (70, 9), (1, 2), (8, 2), (9, 7)],
}
turns = iter([turn for pair in zip(*readings.values()) for turn in pair])
timed = bench._timed

def on_a_set_clock(work):
    assert min(timed(work)) > 0
    return next(turns)

bench._timed = on_a_set_clock
bench.main(bench.parser().parse_args(["--rounds", "3", "--samples", "8", "--micro-batch-tokens", "256"]))
"""

SAME_WEIGHTS = """
import json, sys, tempfile
sys.path.insert(0, "tools")
import bench_step as bench
import torch

options = bench.parser().parse_args(["--samples", "24", "--micro-batch-tokens", "512"])
with tempfile.TemporaryDirectory() as folder:
    policy = f"{folder}/policy"
    bench.make_policy(policy, options.size)
    recipe = bench.recipe_of(options, policy)
    parallel = bench.init_parallel(recipe)
    ours = bench.make_trainer(recipe, parallel)
    sides = {name: bench.BareMegatron(recipe, parallel, packed=name == "packed") for name in ("padded", "packed")}
batch = bench.batch_of(options, ours.chunks[0].module.family.vocab_size)
weights = dict(ours.chunks[0].module.named_parameters())
with torch.no_grad():
    for parameter in weights.values():
        parameter.mul_(5 if parameter.dim() > 1 else 1)  # predictions that depend on the attention
losses = {}
for name, side in sides.items():
    with torch.no_grad():
        for key, parameter in side.chunk.module.named_parameters():
            parameter.copy_(weights[key])
    losses[name] = [side.step(batch) for _ in range(3)]
means = []
for m in batch.micro_batches:
    spans = list(zip(m.cu_seqlens.tolist(), m.cu_seqlens.tolist()[1:]))
    found = ours.logprobs([m.tokens[a:b].tolist() for a, b in spans])
    masks = [m.loss_mask[a : b - 1].tolist() for a, b in spans]
    chosen = [value for row, mask in zip(found, masks) for value, counts in zip(row, mask) if counts]
    assert len(chosen) == int(m.loss_mask.sum())
    means.append(-sum(chosen) / len(chosen))
losses["ours"] = sum(means) / len(means)
print(json.dumps({**losses, "micro_batches": len(means)}))
"""


def last_line_of(code):
    """What a program prints last, from JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TOOL.parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_all_sides_compute_the_same_log_probabilities():
    """From the same weights both bare sides have the loss that our log-probabilities make, also after their steps."""
    losses = last_line_of(SAME_WEIGHTS)
    assert losses["micro_batches"] >= 2
    assert losses["packed"] == pytest.approx(losses["padded"], rel=1e-5)
    assert losses["packed"][0] == pytest.approx(losses["ours"], rel=1e-5)
    assert losses["packed"][2] != losses["packed"][0]


@pytest.mark.slow
def test_medians_of_the_rounds_after_two_that_warm_up():
    """Real steps on all sides; the seconds are set: medians 2, 4 and 8, of processor time 1, 4 and 2."""
    result = last_line_of(SET_CLOCK)
    assert result["bench"] == "step"
    assert (result["ratio"], result["cpu_ratio"]) == (0.5, 0.25)
    assert (result["ratio_packed"], result["cpu_ratio_packed"]) == (0.25, 0.5)
    assert result["ours_tokens_per_second"] == round(result["tokens"] / 2)
    assert result["bare_tokens_per_second"] == round(result["tokens"] / 4)
    assert result["packed_tokens_per_second"] == round(result["tokens"] / 8)
    assert result["tokens"] > result["loss_tokens"] > 0
    assert result["padded_tokens"] >= result["tokens"] >= 8 * 24
    assert result["micro_batches"] >= 2 and result["threads"] == 1
    assert result["machine"]["cores"] == os.cpu_count()

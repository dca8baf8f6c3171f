"""Time of our trainer's step relative to a bare Megatron-Core step on the same samples.

    python tools/bench_step.py [--rounds 15] [--samples 128] [--threads 1] [--policy FOLDER]

Both sides use the same devices, layers, attention, optimizer and micro-batches, and take turns in one process. Ours
packs sequences and trains CISPO with its metrics; bare Megatron pads every micro-batch to its longest sequence and
trains GPTModel's cross-entropy. Prints one JSON line: `ratio` is ours over bare of the median times, `cpu_ratio` the
same of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkout import explained


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--samples", type=int, default=128)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--micro-batch-tokens", type=int, default=4096)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--policy", help="Hugging Face folder; without it the tiny task's policy with random weights")
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import numpy as np
    import torch
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_scalerl.batching.packing import pack, real_tokens
    from megatron_scalerl.distributed.parallel import Parallel, init_parallel
    from megatron_scalerl.models import family as family_of
    from megatron_scalerl.models import read_hf_config
    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.tiny.policy import make_llama
    from megatron_scalerl.trainer.layers.spec import block_submodules
    from megatron_scalerl.trainer.optimizer import build_optimizer
    from megatron_scalerl.trainer.options import ddp_config, model_options
    from megatron_scalerl.trainer.step import make_trainer
    from megatron_scalerl.types import Batch, MicroBatch, Rollout, Sample

SHORTEST, LONGEST = 24, 88
"""Tokens of a sample with its prompt, as the quickstart's."""


class BareMegatron:
    """What a pretraining loop does: GPTModel, padded rows [b, s], cross-entropy averaged over tokens."""

    def __init__(self, recipe: Recipe, parallel: Parallel) -> None:
        family = family_of(read_hf_config(recipe.policy.path))
        options = model_options(family, recipe, parallel)
        self.config = options.config
        self.config.finalize_model_grads_func = finalize_model_grads
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=block_submodules(self.config, family, pp_rank=0, vp_stage=None),
            vocab_size=family.vocab_size,
            position_embedding_type="rope",
            **options.gpt,
        )
        self.chunk = DistributedDataParallel(self.config, ddp_config(recipe), model)
        self.optimizer = build_optimizer([self.chunk], recipe)

    def step(self, rows: list[dict[str, torch.Tensor]]) -> float:
        """One optimiser step; the mean loss."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.chunk.train()
        logged = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(rows),
            model=[self.chunk],
            num_microbatches=len(rows),
            seq_length=LONGEST,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        return sum(entry.item() for entry in logged) / len(logged)


def _forward(rows: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    row = next(rows)
    output = model(row["tokens"], row["position_ids"], None, labels=row["targets"])
    return output, partial(_mean_loss, row["mask"])


def _mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = (losses * mask).sum() / mask.sum()
    return loss, loss.detach().clone()


def padded(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    """The micro-batch's sequences as rows [b, s], padded to the longest."""
    starts = micro_batch.cu_seqlens.tolist()
    shape = (len(starts) - 1, max(b - a for a, b in zip(starts, starts[1:])))
    tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.float32)
    for row, (a, b) in enumerate(zip(starts, starts[1:])):
        tokens[row, : b - a] = micro_batch.tokens[a:b]
        targets[row, : b - a] = micro_batch.targets[a:b]
        mask[row, : b - a] = micro_batch.loss_mask[a:b]
    positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
    arrays = {"tokens": tokens, "targets": targets, "mask": mask, "position_ids": positions}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def draw_samples(count: int, vocab_size: int) -> list[Sample]:
    """Samples of random tokens, a third of each its prompt."""
    rng = random.Random(0)
    samples = []
    for _ in range(count):
        size = rng.randint(SHORTEST, LONGEST)
        ids = tuple(rng.randrange(vocab_size) for _ in range(size))
        prompt, completion = ids[: size // 3], ids[size // 3 :]
        rollout = Rollout(
            token_ids=completion,
            rollout_logprobs=(-4.0,) * len(completion),
            policy_versions=(0,) * len(completion),
            loss_mask=(True,) * len(completion),
            interrupted=False,
            truncated=False,
            thinking_cut=0,
            seed=0,
        )
        weight = 1.0 / (count * len(completion))
        advantage = rng.choice((-1.0, 1.0))
        samples.append(Sample(prompt_token_ids=prompt, rollout=rollout, advantage=advantage, token_weight=weight))
    return samples


def measure(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Medians of both sides over rounds in which each steps once."""
    recipe = Recipe.model_validate(
        {
            "name": "bench_step",
            "steps": 1,
            "policy": {"path": policy, "dtype": options.dtype},
            "prompts": {"path": "none.jsonl"},
            "trainer": {"threads": options.threads, "micro_batch_tokens": options.micro_batch_tokens},
        }
    )
    parallel = init_parallel(recipe)
    ours, bare = make_trainer(recipe, parallel), BareMegatron(recipe, parallel)
    vocab_size = family_of(read_hf_config(policy)).vocab_size
    [batch] = pack(
        draw_samples(options.samples, vocab_size),
        step=1,
        dp_size=1,
        micro_batch_tokens=options.micro_batch_tokens,
        pad_multiple=1,
        policy_version=0,
    )
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    cpu: dict[str, list[float]] = {"ours": [], "bare": []}
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: ours.step(batch), "bare": lambda: _bare_step(bare, batch)}
    for round_number in range(options.rounds + 2):
        for side, work in sides.items():
            wall, busy = _timed(work)
            if round_number >= 2:  # the first rounds allocate
                seconds[side].append(wall)
                cpu[side].append(busy)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    cells = sum(int(padded(m)["tokens"].numel()) for m in batch.micro_batches)
    return {
        "bench": "step",
        "ratio": round(medians["ours"] / medians["bare"], 4),
        "ours_seconds": round(medians["ours"], 4),
        "bare_seconds": round(medians["bare"], 4),
        "cpu_ratio": round(statistics.median(cpu["ours"]) / statistics.median(cpu["bare"]), 4),
        "ours_tokens_per_second": round(real_tokens(batch) / medians["ours"]),
        "bare_tokens_per_second": round(real_tokens(batch) / medians["bare"]),
        "tokens": real_tokens(batch),
        "padded_tokens": cells,
        "micro_batches": len(batch.micro_batches),
        "parameters": sum(p.numel() for p in bare.chunk.parameters()),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "spread": {side: [round(min(v), 4), round(max(v), 4)] for side, v in seconds.items()},
        "threads": options.threads,
        "machine": machine(),
    }


def _bare_step(bare: BareMegatron, batch: Batch) -> float:
    # Padding is part of the bare side's work, as packing tensors onto the device is of ours.
    return bare.step([padded(m) for m in batch.micro_batches])


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds; the latter tell more on a machine that others load."""
    wall, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - busy


def machine() -> dict[str, Any]:
    """What this ran on, and how busy it was."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    load = round(os.getloadavg()[0], 2)
    return {"cpu": model, "cores": os.cpu_count(), "load_average": load, "torch": torch.__version__}


def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        policy = options.policy
        if policy is None:
            policy = f"{folder}/policy"
            make_llama(policy, seed=0)
        print(json.dumps(measure(options, policy)))


if __name__ == "__main__":
    main(OPTIONS)

"""Parts families-*: each family's trainer on this device compared with transformers in fp32 on the CPU.

Log-probs and one step are compared. Plain layers run in fp32, with a tight tolerance, and in bf16; Transformer
Engine's layers in bf16 only, as they require for packed sequences. The tolerance in bf16 is relative to the bf16
error of transformers. Weights are stored in bf16, so that both precisions start from the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_scalerl.check_gpu.cases import Case, batch_of, case_of, check_layers, samples
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.check_gpu.step_parity import (
    Step,
    bf16_distances,
    bound_threads,
    fp32_distances,
    in_transformers,
    two_bf16_distances,
    typical,
    without_ties,
)
from megatron_scalerl.check_gpu.table import KINDS
from megatron_scalerl.distributed.parallel import Parallel, shutdown_parallel
from megatron_scalerl.trainer.ranks import init_parallel
from megatron_scalerl.trainer.step import make_trainer

RECORD = "families-plain.json"
"""In the scratch folder: results of plain layers in bf16."""


def run(setting: PartSetting, record: Recorder) -> None:
    """Report the part's checks."""
    plain = setting.layers != "te"
    check_layers(setting)
    bound_threads()
    folder = setting.scratch / setting.part
    parallel: Parallel | None = None
    left: dict[str, Any] = {}
    for kind in KINDS:
        with record.guarded(kind):
            case, path = case_of(kind, toy=setting.toy), folder / kind
            case.write(path)
            case, exact = without_ties(case, path)
            rounded = in_transformers(case, path, torch.bfloat16)
            own = typical(kind, rounded.logprobs, exact.logprobs)
            parallel = parallel or init_parallel(case.recipe(path, "bfloat16"))
            distances = []
            if plain:
                distances = fp32_distances(in_trainer(case, path, "float32", parallel), exact)
            found = in_trainer(case, path, "bfloat16", parallel)
            distances += bf16_distances(kind, found, exact, own)
            record.compared(kind, distances)
            left[kind] = {
                "logprobs": found.logprobs.tolist(),
                "loss": found.loss,
                "grad_norm": found.grad_norm,
                "own": own,
            }
    if parallel:
        shutdown_parallel()
    if plain:
        (setting.scratch / RECORD).write_text(json.dumps(left), encoding="utf8")
    else:
        same_step(left, setting.scratch / RECORD, record)


def in_trainer(case: Case, path: Path, dtype: str, parallel: Parallel) -> Step:
    """The trainer's step on packed sequences; its own log-probs replace the engine's, so that all ratios are 1."""
    trainer = make_trainer(case.recipe(path, dtype), parallel)
    ids = case.token_ids()
    logprobs = trainer.logprobs(ids)
    report = trainer.step(batch_of(samples(ids, logprobs), case.micro_batch_tokens))
    return Step(logprobs=np.concatenate(logprobs), loss=report.loss, grad_norm=report.grad_norm)


def same_step(found: Mapping[str, Any], path: Path, record: Recorder) -> None:
    """Compare the step of these layers with that of plain layers, stored in `path`."""
    plain = json.loads(path.read_text(encoding="utf8")) if path.exists() else {}
    for kind in KINDS:
        check = f"{kind} same step as plain"
        if kind not in found or kind not in plain:
            who = "families-plain" if kind not in plain else "this part"
            record.not_run(check, f"no result of {who} for {kind} in {path.parent}")
            continue
        with record.guarded(check):
            ours, theirs = (
                Step(logprobs=np.asarray(step["logprobs"]), loss=step["loss"], grad_norm=step["grad_norm"])
                for step in (found[kind], plain[kind])
            )
            record.compared(check, two_bf16_distances(kind, ours, theirs, found[kind]["own"]))

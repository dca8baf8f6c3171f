"""The checks of the part `trainer` with their tolerances: losses, packing, one step, checkpoint, memory."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_scalerl.check_gpu import loss_parity
from megatron_scalerl.check_gpu.cases import Case, batch_of, check_layers
from megatron_scalerl.check_gpu.device_memory import memory
from megatron_scalerl.check_gpu.findings import Distance, Recorder, relative
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.check_gpu.parts.trainer import (
    DTYPES,
    POLICY,
    RATE_ENDS,
    Outcome,
    Reference,
    build_trainer,
    gradient_of,
    make_outcome,
    trained_samples,
)
from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.parallel import shutdown_parallel, unwrap
from megatron_scalerl.losses import LOSSES
from megatron_scalerl.trainer import checkpoint
from megatron_scalerl.trainer.ranks import init_parallel
from megatron_scalerl.types import Batch

LOGPROB_BOUND = 1e-4
"""Nats. The error of fp32 is up to 1.2e-5 on these policies (on a CPU); that of TF32 would be 1e-2."""
GRADIENT_BOUND = 1e-4
"""Relative L2. The error of fp32 is 3e-6 to 7e-6 (on a CPU)."""
WEIGHT_BOUND = 1e-5
"""Relative L2. The step changes the weights by 6 to 14 percent (`Case.recipe`), so this is 1e-4 of the update."""
SCALAR_BOUND = 1e-5
"""Relative, for loss and gradient norm: rounding averages out in these sums (4e-7 on a CPU)."""
BF16_FACTOR = 1.5
"""Bound of a device's bf16 error relative to the CPU's bf16 error. Both round every layer's output once and
accumulate in fp32; accumulating a product or a softmax in bf16 exceeds it."""
BF16_NORM_BOUND = 0.03
"""Relative (0.1 to 0.7 percent on a CPU)."""
GROWTH_BOUND_MIB = 0.01
"""Less than a leak of one column of a micro-batch in each of four steps."""
_MIB = 2**20


def report_all(setting: PartSetting, record: Recorder, case: Case, folder: Path, reference: Reference) -> None:
    """All checks of the part; writes the case's policy, which the process `reference` is waiting for."""
    check_layers(setting)
    case.write(folder / "written")
    (folder / "written").rename(folder / POLICY)
    policy, found = folder / POLICY, {}
    parallel = init_parallel(case.recipe(policy, DTYPES[0]))
    _losses(setting, record)
    trainer = build_trainer(case, policy, "float32", parallel)
    with record.guarded("step fp32"):
        found["float32"] = make_outcome(trainer, case)
    with record.guarded("packing"):
        _packing(trainer, case, record)
    trainer = build_trainer(case, policy, "bfloat16", parallel)
    with record.guarded("step bf16"):
        found["bfloat16"] = make_outcome(trainer, case)
    with record.guarded("memory after steps"):
        memory_after_steps(trainer, case, judged=setting.on_gpu, record=record)
    with record.guarded("checkpoint"):
        _checkpoint(trainer, build_trainer(case, policy, "bfloat16", parallel), case, folder / "checkpoint", record)
    _compare_steps(found, reference, folder, setting, record)
    shutdown_parallel()


def _losses(setting: PartSetting, record: Recorder) -> None:
    with record.guarded("losses"):
        inputs = loss_parity.loss_inputs(512 if setting.toy else 4096)
        record.compared("losses", [d for name in LOSSES for d in loss_parity.compare(name, inputs, device.device())])


def _packing(trainer: Any, case: Case, record: Recorder) -> None:
    """Log-probs and the gradient of one step with packed sequences and with one sequence per row."""
    ids = case.token_ids()
    packed = np.concatenate(trainer.logprobs(ids))
    alone = np.concatenate([trainer.logprobs([row])[0] for row in ids])
    found = trained_samples(case)
    rows = batch_of(found, case.micro_batch_tokens, step=RATE_ENDS + 1)
    single = tuple(m for s in found for m in batch_of([s], case.micro_batch_tokens).micro_batches)
    assert len(rows.micro_batches) < len(single)
    trainer.step(rows)
    gradient = gradient_of(trainer)
    trainer.step(Batch(step=RATE_ENDS + 2, micro_batches=single))
    record.compared(
        "packing",
        [
            Distance(name="log-probs", found=float(np.abs(packed - alone).max()), bound=LOGPROB_BOUND),
            relative("gradient", gradient_of(trainer), gradient, GRADIENT_BOUND),
        ],
    )


def memory_after_steps(trainer: Any, case: Case, *, judged: bool, record: Recorder) -> None:
    """Growth of allocated memory from step 2 to step 6; has a bound if `judged`, on a GPU."""
    batch = batch_of(trained_samples(case), case.micro_batch_tokens)
    allocated = []
    for step in range(2, 7):
        trainer.step(replace(batch, step=step))
        gc.collect()
        allocated.append(memory().allocated)
    growth = (allocated[-1] - allocated[0]) / _MIB
    record.measured(
        "memory after steps",
        growth,
        "MiB",
        at_most=GROWTH_BOUND_MIB if judged else None,
        detail="device memory, step 2 to step 6" if judged else "resident set, step 2 to step 6, no bound on a CPU",
        data={"allocated_bytes": allocated},
    )


def _checkpoint(trainer: Any, other: Any, case: Case, path: Path, record: Recorder) -> None:
    """Save one trainer, load another from it, and compare their whole state bit by bit.

    The other then makes a step, after which the step counter of each weight must have increased by one.
    """
    extra = {"written_by": "check-gpu"}
    checkpoint.save(path, trainer, extra)
    before = _state(other)
    found = checkpoint.load(path, other)
    saved, loaded = _state(trainer), _state(other)
    shutil.rmtree(path)
    places = {value.device.type for value in loaded.values() if value.dim()}
    different = [name for name in saved if name not in loaded or not torch.equal(saved[name], loaded[name])]
    moved = any(not torch.equal(before[name], value) for name, value in loaded.items() if name.startswith("weight"))
    other.step(batch_of(trained_samples(case), case.micro_batch_tokens, step=trainer.steps_made + 1))
    counted, expected = _steps(_state(other)), {step + 1 for step in _steps(saved)}
    faults = {
        f"{len(different)} of {len(saved)} tensors differ, first {different[:1]}": bool(different),
        "loaded tensors differ from those saved": saved.keys() != loaded.keys(),
        "loading changed no weight, so the check is void": not moved,
        "loaded extra data differ from those saved": found != extra,
        f"tensors on {', '.join(sorted(places))}": places != {trainer.parallel.device.type},
        f"step counters after one more step: expected {sorted(expected)}, found {sorted(counted)}": counted
        != expected,
    }
    problems = "; ".join(fault for fault, is_so in faults.items() if is_so)
    record.holds("checkpoint", not problems, problems or f"{len(saved)} tensors bitwise equal")


def _steps(state: dict[str, torch.Tensor]) -> set[int]:
    """Adam's step counters."""
    return {int(value) for name, value in state.items() if name.startswith("step ")}


def _state(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights, main weights and optimizer state by name."""
    named = unwrap(trainer.chunks[0]).named_parameters()
    found = {f"weight {name}": parameter.detach().clone() for name, parameter in named}
    for i, optimizer in enumerate(trainer.optimizer.chained_optimizers):
        for j, group in enumerate(optimizer.optimizer.param_groups):
            if not any("step" in state for state in optimizer.optimizer.state.values()):
                # fused Adam counts steps per group; PyTorch's counts them per parameter, and loading sets both
                found[f"step {i}.{j}"] = torch.tensor(int(group.get("step", 0)))
            for k, parameter in enumerate(group["params"]):
                found[f"main weight {i}.{j}.{k}"] = parameter.detach().clone()
                for name, value in optimizer.optimizer.state.get(parameter, {}).items():
                    kept = torch.as_tensor(value).detach().clone()
                    found[f"{name} {i}.{j}.{k}"] = kept if kept.dim() else kept.cpu()  # counters may be on either
    return found


def _compare_steps(
    found: dict[str, Outcome], reference: Reference, folder: Path, setting: PartSetting, record: Recorder
) -> None:
    """Compare step 1 in both precisions with the CPU's."""
    code = reference.wait(timeout=setting.limit_s)
    cpu = {dtype: Outcome.load(folder / f"cpu-{dtype}.npz") for dtype in DTYPES} if code == 0 else {}
    for dtype, check in (("float32", "step fp32"), ("bfloat16", "step bf16")):
        if dtype not in found:
            continue  # already reported as failed
        with record.guarded(check):
            if not cpu:
                raise RuntimeError(f"the reference process on the CPU: expected exit code 0, found {code}")
            distances = compare_fp32 if dtype == "float32" else compare_bf16
            record.compared(check, distances(found[dtype], cpu))


def compare_fp32(found: Outcome, cpu: dict[str, Outcome]) -> list[Distance]:
    """fp32 on this device compared with fp32 on the CPU."""
    expected = cpu["float32"]
    apart = np.abs(found.logprobs.astype(np.float64) - expected.logprobs)
    return [
        Distance(name="log-probs", found=float(apart.max()), bound=LOGPROB_BOUND),
        relative("loss", found.loss, expected.loss, SCALAR_BOUND),
        relative("gradient norm", found.grad_norm, expected.grad_norm, SCALAR_BOUND),
        relative("gradient", found.gradient, expected.gradient, GRADIENT_BOUND),
        relative("weights", found.weights, expected.weights, WEIGHT_BOUND),
    ]


def compare_bf16(found: Outcome, cpu: dict[str, Outcome]) -> list[Distance]:
    """bf16 on this device compared with fp32, bounded by the error of the CPU's bf16.

    Rounding averages out in the loss, whose weights add up to 1, and in the gradient norm.
    """
    exact, rounded = cpu["float32"], cpu["bfloat16"]
    distances = []
    for name in ("logprobs", "gradient", "weights"):
        own = relative(name, getattr(rounded, name), getattr(exact, name), 1.0).found
        distances.append(relative(name, getattr(found, name), getattr(exact, name), BF16_FACTOR * own))
    apart = float(np.abs(rounded.logprobs - exact.logprobs).mean())
    return [
        *distances,
        Distance(name="loss", found=abs(float(found.loss - exact.loss)), bound=BF16_FACTOR * apart),
        relative("gradient norm", found.grad_norm, exact.grad_norm, BF16_NORM_BOUND),
    ]

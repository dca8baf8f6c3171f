"""Part trainer: losses, packing, one step, checkpoint and memory on this device, compared with the CPU.

Plain layers, because Transformer Engine supports packed sequences in bf16 only; the part `families` compares the two.

    python -m megatron_scalerl.check_gpu.parts.trainer JSON

is the process that computes the reference on the CPU: it hides the GPUs before anything queries them, uses plain
layers and writes its outcomes in both precisions. In a rehearsal both processes run on the CPU; they import at the
same time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.processes.child_process import end_with
from megatron_scalerl.processes.parent_death import tied_command

if TYPE_CHECKING:
    from megatron_scalerl.check_gpu.cases import Case
    from megatron_scalerl.types import Sample

Reference = subprocess.Popen[bytes]
"""The process that computes the reference on the CPU."""
DTYPES = ("float32", "bfloat16")
POLICY = "policy"
"""Folder of the policy trained by both processes."""
_NEED_A_GPU = ("transformer_engine", "apex")
"""Megatron-Core uses their optimizers if it can import them, even on a CPU, where they do not work."""
RATE_ENDS = 6
"""Later steps have a learning rate of 0: they compute a gradient and keep the weights."""


def run(setting: PartSetting, record: Recorder) -> None:
    """Report the part's checks."""
    folder = setting.scratch / setting.part
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    which: dict[str, Any] = {"kind": "llama", "toy": setting.toy, "small": True}
    reference = start_reference(which, folder)
    try:
        from megatron_scalerl.check_gpu.cases import case_of
        from megatron_scalerl.check_gpu.step_checks import report_all

        report_all(setting, record, case_of(**which), folder, reference)
    finally:
        reference.kill()
        reference.wait()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Log-probs before a step, and the step. Produced by `make_outcome`."""

    logprobs: np.ndarray
    """[T] fp32, nats."""
    loss: np.ndarray
    """[] fp64"""
    grad_norm: np.ndarray
    """[] fp64, before clipping."""
    gradient: np.ndarray
    """[P] fp32, clipped."""
    weights: np.ndarray
    """[P] fp32, after the step."""

    def save(self, path: Path) -> None:
        """Write an .npz file."""
        np.savez(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """Read a file written by `save`."""
        with np.load(path, allow_pickle=False) as found:
            return cls(**{field.name: found[field.name] for field in fields(cls)})


def build_trainer(case: Case, path: str | Path, dtype: str, parallel: Any) -> Any:
    """The case's trainer with the weights of `path`."""
    from megatron_scalerl.trainer.step import make_trainer

    recipe = case.recipe(path, dtype)
    rate = recipe.optimizer.lr
    return make_trainer(recipe, parallel, learning_rate=lambda step: rate if step <= RATE_ENDS else 0.0)


def trained_samples(case: Case) -> list[Sample]:
    """The case's samples with random engine log-probs, so that some importance weights are capped."""
    from megatron_scalerl.check_gpu.cases import samples

    rng = np.random.default_rng(5)
    ids = case.token_ids()
    return samples(ids, [(-8.0 * rng.random(len(row) - 1)).tolist() for row in ids])


def make_outcome(trainer: Any, case: Case) -> Outcome:
    """Score the sequences, then make step 1."""
    from megatron_scalerl.check_gpu.cases import batch_of

    logprobs = np.concatenate([np.asarray(row, dtype=np.float32) for row in trainer.logprobs(case.token_ids())])
    report = trainer.step(batch_of(trained_samples(case), case.micro_batch_tokens))
    return Outcome(
        logprobs=logprobs,
        loss=np.asarray(report.loss),
        grad_norm=np.asarray(report.grad_norm),
        gradient=gradient_of(trainer),
        weights=weights_of(trainer),
    )


def gradient_of(trainer: Any) -> np.ndarray:
    """[P] fp32 gradient of the last step, clipped."""
    return _joined(parameter.main_grad for parameter in _parameters(trainer))


def weights_of(trainer: Any) -> np.ndarray:
    """[P] fp32 copy of the weights."""
    return _joined(parameter.detach() for parameter in _parameters(trainer))


def start_reference(which: Mapping[str, Any], folder: Path) -> Reference:
    """Start the reference process, which dies with this one and writes `cpu-DTYPE.npz` into `folder`.

    which: keywords of `cases.case_of`; the process waits for the case's policy as POLICY in `folder`.
    """
    job = json.dumps({"case": dict(which), "folder": str(folder)})
    argv = [sys.executable, "-m", "megatron_scalerl.check_gpu.parts.trainer", job]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MSRL_LAYERS": "plain"}
    return subprocess.Popen(tied_command(argv), env=env, stdin=subprocess.DEVNULL)


def main() -> None:
    """The reference process."""
    job = json.loads(sys.argv[1])
    for package in _NEED_A_GPU:
        sys.modules[package] = None  # type: ignore[assignment]
    from megatron_scalerl.check_gpu.cases import case_of
    from megatron_scalerl.trainer.ranks import init_parallel

    case, folder = case_of(**job["case"]), Path(job["folder"])
    policy = folder / POLICY
    while not policy.exists():  # this process dies with the one that writes it
        time.sleep(0.05)
    parallel = init_parallel(case.recipe(policy, DTYPES[0]))
    assert parallel.device.type == "cpu", "the reference runs on the CPU"
    for dtype in DTYPES:
        outcome = make_outcome(build_trainer(case, policy, dtype, parallel), case)
        outcome.save(folder / f"cpu-{dtype}.npz")


def _parameters(trainer: Any) -> list[Any]:
    from megatron_scalerl.distributed.parallel import unwrap

    return list(unwrap(trainer.chunks[0]).parameters())


def _joined(tensors: Any) -> np.ndarray:
    return np.concatenate([tensor.float().flatten().cpu().numpy() for tensor in tensors])


if __name__ == "__main__":
    end_with(main)

"""What a trainer makes of a case, as arrays that travel from the process of one device to that of another.

    python -m megatron_scalerl.check_gpu.outcome JSON

is that process for the CPU: it hides the GPUs before anything asks for them, takes plain layers, and writes the
outcomes in both precisions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_scalerl.processes.parent_death import tied_command

if TYPE_CHECKING:
    from megatron_scalerl.check_gpu.cases import Case
    from megatron_scalerl.types import Sample

Reference = subprocess.Popen[bytes]
"""The CPU's process."""
DTYPES = ("float32", "bfloat16")
POLICY = "policy"
"""Folder of the policy that both processes train."""
_NEED_A_GPU = ("transformer_engine", "apex")
"""Megatron-Core takes their optimisers wherever it can import them, on a CPU too, where they do not work."""
RATE_ENDS = 6
"""Steps from the next one on have a learning rate of 0: they compute a gradient and leave the weights."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Log-probabilities before a step, and the step. Produced by `make_outcome`."""

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
        """As an .npz file."""
        np.savez(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """What `save` wrote."""
        with np.load(path, allow_pickle=False) as found:
            return cls(**{field.name: found[field.name] for field in fields(cls)})


def build_trainer(case: Case, path: str | Path, dtype: str, parallel: Any) -> Any:
    """The case's trainer with the weights of `path`."""
    from megatron_scalerl.trainer.step import make_trainer

    recipe = case.recipe(path, dtype)
    rate = recipe.optimizer.lr
    return make_trainer(recipe, parallel, learning_rate=lambda step: rate if step <= RATE_ENDS else 0.0)


def trained_samples(case: Case) -> list[Sample]:
    """The case's samples with random engine log-probabilities, so that some weights are capped."""
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
    """[P] fp32 gradient of the last step, as it was clipped."""
    return _joined(parameter.main_grad for parameter in _parameters(trainer))


def weights_of(trainer: Any) -> np.ndarray:
    """[P] fp32 copy of the weights."""
    return _joined(parameter.detach() for parameter in _parameters(trainer))


def start_reference(which: Mapping[str, Any], folder: Path) -> Reference:
    """Start the CPU's process, which ends with this one; it writes `cpu-DTYPE.npz` into `folder`.

    which: keywords of `cases.case_of`, whose policy it awaits as POLICY in `folder`.
    """
    asked = json.dumps({"case": dict(which), "folder": str(folder)})
    argv = [sys.executable, "-m", "megatron_scalerl.check_gpu.outcome", asked]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MSRL_LAYERS": "plain"}
    return subprocess.Popen(tied_command(argv), env=env, stdin=subprocess.DEVNULL)


def main() -> None:
    """The CPU's process."""
    asked = json.loads(sys.argv[1])
    for package in _NEED_A_GPU:
        sys.modules[package] = None  # type: ignore[assignment]
    from megatron_scalerl.check_gpu.cases import case_of
    from megatron_scalerl.distributed.parallel import init_parallel

    case, folder = case_of(**asked["case"]), Path(asked["folder"])
    policy = folder / POLICY
    while not policy.exists():  # this process dies with the one that writes it
        time.sleep(0.05)
    parallel = init_parallel(case.recipe(policy, DTYPES[0]))
    assert parallel.device.type == "cpu", "the reference is the CPU's"
    for dtype in DTYPES:
        outcome = make_outcome(build_trainer(case, policy, dtype, parallel), case)
        outcome.save(folder / f"cpu-{dtype}.npz")


def _parameters(trainer: Any) -> list[Any]:
    from megatron_scalerl.distributed.parallel import unwrap

    return list(unwrap(trainer.chunks[0]).parameters())


def _joined(tensors: Any) -> np.ndarray:
    return np.concatenate([tensor.float().flatten().cpu().numpy() for tensor in tensors])


if __name__ == "__main__":
    main()

"""The table "what has run where" of docs/gpu.md: which checks prove that a component ran on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_scalerl.check_gpu.findings import Status
from megatron_scalerl.check_gpu.table import KINDS, PARALLEL


@dataclass(frozen=True, kw_only=True)
class Row:
    """One component."""

    component: str
    """As docs/gpu.md names it."""
    checks: tuple[str, ...]
    """PART/CHECK, all of which have to pass; () where no check of one machine can prove it."""


def _of(part: str, *checks: str) -> tuple[str, ...]:
    return tuple(f"{part}/{check}" for check in checks)


ROWS: tuple[Row, ...] = (
    Row(component="losses, packing of batches", checks=_of("trainer", "losses", "packing")),
    Row(
        component="trainer on one device, plain layers, dense and MoE",
        checks=_of("trainer", "step fp32", "step bf16", "checkpoint", "memory after steps")
        + _of("families-plain", *KINDS),
    ),
    Row(
        component="trainer with Transformer Engine's layers",
        checks=_of("families-te", *KINDS, *(f"{kind} same step as plain" for kind in KINDS)),
    ),
    Row(component="apex's fused norms and Adam", checks=()),
    Row(
        component="trainer across devices: TP, PP, EP, CP, DP",
        checks=_of("parallel", *PARALLEL, *(f"{name} te" for name in PARALLEL)),
    ),
    Row(component="fp32 logit projection, torch backend", checks=_of("logits", "parity torch")),
    Row(
        component="fp32 logit projection, cuBLAS and Triton row kernels",
        checks=_of("logits", "parity cuda", "no TF32", "workspace bound", "chosen backend"),
    ),
    Row(component="fp32 logit projection, fused in Triton", checks=_of("logits", "parity triton")),
    Row(
        component="speed and memory targets of the logit projection",
        checks=_of(
            "logits",
            "forward GEMM share",
            "GEMM share",
            "forward extra memory",
            "block memory",
            "over Liger",
            "over cut-cross-entropy",
            "over naive bf16",
        ),
    ),
    Row(
        component="families Llama, Qwen3, Qwen3-MoE, Llama 4 against transformers",
        checks=_of("families-plain", *KINDS),
    ),
    Row(component="checkpoint converter, export of a run", checks=()),
    Row(
        component="planner's memory of plain layers",
        checks=_of("shapes-plain", "1b memory", "8b memory", "8b_long memory", "8b_recompute memory"),
    ),
    Row(
        component="planner's memory of Transformer Engine's layers",
        checks=_of("shapes-te", "1b memory", "8b memory", "8b_long memory", "8b_recompute memory"),
    ),
    Row(
        component="vLLM engine, forced interruption, secret on every path",
        checks=_of("engine", "start", "fp32 head", "trainer parity", "interruption", "secret", "pause"),
    ),
    Row(component="routing replay, experts as the engine chose them", checks=_of("engine", "routed experts")),
    Row(component="weight update over gloo", checks=_of("engine", "update", "probe")),
    Row(
        component="weight update over NCCL",
        checks=_of("wire", "digest", "send") + _of("parallel", "broadcast"),
    ),
    Row(
        component="PipelineRL-k end to end on the tiny recipe, eager and with CUDA graphs",
        checks=_of("loop", "warm start", "eager", "graphs", "model logits", "mismatch fp32 below model"),
    ),
    Row(component="the 8B recipe's layout on a cut-down policy, 8 GPUs", checks=_of("recipe-8b", "steps", "memory")),
    Row(component="advantages, filters, verifier, prompts, curriculum, ledger, forecast", checks=()),
    Row(component="Slurm; a run, or a conversion, at 8B or 17B×16", checks=()),
    Row(component="`tools/install.sh gpu`", checks=()),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one report says of a row."""

    component: str
    proved: bool
    failed: tuple[str, ...]
    """Checks that failed, and targets that were missed."""
    missing: tuple[str, ...]
    """Checks that did not run."""


def verdicts(status: Mapping[str, Status]) -> list[Verdict]:
    """One for each row that a check can prove. status: by PART/CHECK; what is absent did not run."""
    return [_verdict(row, status) for row in ROWS if row.checks]


def _verdict(row: Row, status: Mapping[str, Status]) -> Verdict:
    failed = tuple(check for check in row.checks if status.get(check) in ("failed", "missed"))
    missing = tuple(check for check in row.checks if status.get(check, "not run") == "not run")
    return Verdict(component=row.component, proved=not failed and not missing, failed=failed, missing=missing)

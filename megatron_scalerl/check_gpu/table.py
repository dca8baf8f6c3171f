"""The two tables of docs/gpu.md: the parts with their checks, and the components that the checks prove."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_scalerl.check_gpu.findings import Status
from megatron_scalerl.check_gpu.part import Layers, Size

_HERE = "megatron_scalerl.check_gpu.parts."
PARALLEL = ("TP2", "EP2", "PP2", "CP2", "DP2")
"""Parallel layouts on two devices."""
KINDS = ("llama", "qwen3", "qwen3_moe", "llama4")
_SHAPES = ("1b", "8b", "8b_long", "8b_recompute")
_NO_CPU = "Transformer Engine has no CPU kernels"
_FAMILIES: tuple[tuple[Layers, str, float, str], ...] = (
    ("plain", "plain", 90, ""),
    ("te", "Transformer Engine", 120, _NO_CPU),
)
_FULL_SIZE: tuple[tuple[Layers, str, float, float | None, str], ...] = (
    ("plain", "plain", 200, None, ""),
    ("te", "Transformer Engine", 220, 60, _NO_CPU),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One row of the table."""

    name: str
    module: str
    """Dotted name of the module whose `run` is called."""
    what: str
    limit_s: float
    """Time limit on GPUs, seconds."""
    quick_s: float | None = None
    """Time limit with `--quick`; None: not part of it."""
    rehearsal_s: float = 240.0
    """Time limit on a CPU at toy size."""
    gpus: int = 1
    """Required GPUs."""
    layers: Layers | None = None
    package: str = ""
    """Module that the part requires; "" for none."""
    not_on_cpu: str = ""
    """Why the part cannot be rehearsed on a CPU; "" if it can."""
    checks: tuple[str, ...] = ()
    """The checks it reports, without the part's name."""

    def seconds(self, size: Size) -> float:
        """Its time limit."""
        return {"toy": self.rehearsal_s, "quick": self.quick_s or self.limit_s, "full": self.limit_s}[size]


PARTS: tuple[Part, ...] = (
    Part(
        name="environment",
        module=_HERE + "environment",
        what="driver, CUDA, NCCL, Transformer Engine, apex, vLLM: versions, and the effect of missing packages",
        limit_s=45,
        quick_s=45,
        checks=(
            "driver",
            "torch",
            "nccl",
            "compiler",
            "megatron-core",
            "transformer-engine",
            "apex",
            "flash-attn",
            "vllm",
            "idle",
        ),
    ),
    Part(
        name="logits",
        module=_HERE + "logits",
        what="logit projection: parity with fp64 and with the CPU, benchmark against peers",
        limit_s=210,
        quick_s=80,
        checks=(
            "parity torch",
            "parity cuda",
            "parity triton",
            "no TF32",
            "workspace bound",
            "chosen backend",
            "benchmark",
            "forward GEMM share",
            "GEMM share",
            "forward extra memory",
            "block memory",
            "over Liger",
            "over cut-cross-entropy",
            "over naive bf16",
        ),
    ),
    Part(
        name="trainer",
        module=_HERE + "trainer",
        what="losses, packing and one trainer step with plain layers, GPU compared with CPU",
        limit_s=75,
        quick_s=60,
        layers="plain",
        checks=("losses", "packing", "step fp32", "step bf16", "checkpoint", "memory after steps"),
    ),
    *(
        Part(
            name=f"families-{layers}",
            module=_HERE + "families",
            what=f"Llama, Qwen3, Qwen3-MoE, Llama 4 with {name} layers compared with transformers, one step",
            limit_s=limit,
            layers=layers,
            package="transformer_engine" if layers == "te" else "",
            not_on_cpu=why,
            checks=KINDS if layers == "plain" else (*KINDS, *(f"{kind} same step as plain" for kind in KINDS)),
        )
        for layers, name, limit, why in _FAMILIES
    ),
    *(
        Part(
            name=f"shapes-{layers}",
            module=_HERE + "shapes",
            what=f"1B and 8B shapes with {name} layers: MFU, and peak memory compared with the planner",
            limit_s=limit,
            quick_s=quick,
            layers=layers,
            package="transformer_engine" if layers == "te" else "",
            not_on_cpu=why,
            checks=tuple(f"{shape} {figure}" for shape in _SHAPES for figure in ("MFU", "memory")),
        )
        for layers, name, limit, quick, why in _FULL_SIZE
    ),
    Part(
        name="wire",
        module=_HERE + "wire",
        what="weight digests and packing on the device, NCCL with one rank, CUDA IPC",
        limit_s=60,
        quick_s=55,
        checks=("digest", "send", "tensor between processes"),
    ),
    Part(
        name="engine",
        module=_HERE + "engine",
        what="vLLM: fp32 head, forced interruption, secret, pause, update, probe, routed experts",
        limit_s=180,
        rehearsal_s=360,
        package="vllm",
        checks=(
            "start",
            "fp32 head",
            "trainer parity",
            "interruption",
            "secret",
            "pause",
            "update",
            "probe",
            "routed experts",
            "decode rate",
        ),
    ),
    Part(
        name="loop",
        module=_HERE + "loop",
        what="the tiny recipe end to end in bf16: fp32 logits, eager and with CUDA graphs; bf16 logits",
        limit_s=300,
        rehearsal_s=420,
        package="vllm",
        checks=("warm start", "eager", "graphs", "model logits", "mismatch fp32 below model"),
    ),
    Part(
        name="parallel",
        module=_HERE + "parallel",
        what="two GPUs: TP, EP, PP, CP, DP over NCCL compared with one GPU; NCCL broadcast to another GPU",
        limit_s=480,
        gpus=2,
        checks=(*PARALLEL, *(f"{name} te" for name in PARALLEL), "broadcast"),
    ),
    Part(
        name="recipe-8b",
        module=_HERE + "recipe_8b",
        what="eight GPUs: the 8B recipe's layout on a policy with fewer layers",
        limit_s=240,
        gpus=8,
        checks=("steps", "memory"),
    ),
)


def part_named(name: str) -> Part:
    """The part of that name. Raises ValueError listing the existing parts."""
    for part in PARTS:
        if part.name == name:
            return part
    raise ValueError(f"--only: expected some of {', '.join(p.name for p in PARTS)}, found {name!r}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One component."""

    component: str
    """Its name in docs/gpu.md."""
    checks: tuple[str, ...]
    """PART/CHECK, all of which have to pass; () if no check on one machine can verify it."""


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
        component="weight updates of changed elements (`weights.deltas`), staged ones (`weights.transaction`), "
        "shared memory (`weights.transport: shm`), the store of weights (`weights.store`)",
        checks=(),
    ),
    Row(component="weight update over NCCL", checks=_of("wire", "digest", "send") + _of("parallel", "broadcast")),
    Row(
        component="PipelineRL-k end to end on the tiny recipe, eager and with CUDA graphs",
        checks=_of("loop", "warm start", "eager", "graphs", "model logits", "mismatch fp32 below model"),
    ),
    Row(component="the 8B recipe's layout on a cut-down policy, 8 GPUs", checks=_of("recipe-8b", "steps", "memory")),
    Row(component="advantages, filters, verifier, prompts, curriculum, ledger, forecast", checks=()),
    Row(component="evaluation: of a folder, and during a run on an engine that is held", checks=()),
    Row(component="checks of a node (`doctor`): NVML, the loaded NCCL", checks=()),
    Row(component="Slurm; a run, or a conversion, at 8B or 17B×16", checks=()),
    Row(component="`tools/install.sh gpu`", checks=()),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one report for a component."""

    component: str
    proved: bool
    failed: tuple[str, ...]
    """Failed checks and missed targets."""
    missing: tuple[str, ...]
    """Checks that did not run."""


def verdicts(status: Mapping[str, Status]) -> list[Verdict]:
    """One per component that checks can verify. status: by PART/CHECK; absent checks did not run."""
    return [_verdict(row, status) for row in ROWS if row.checks]


def _verdict(row: Row, status: Mapping[str, Status]) -> Verdict:
    failed = tuple(check for check in row.checks if status.get(check) in ("failed", "missed"))
    missing = tuple(check for check in row.checks if status.get(check, "not run") == "not run")
    return Verdict(component=row.component, proved=not failed and not missing, failed=failed, missing=missing)

"""Time, memory and error of the logit projection beside those of others, measured in one run.

    python tools/bench_logits.py [--device cpu|gpu] [--tokens T] [--hidden H] [--vocab V] [--rounds N] [--threads N]
                                 [--backend NAME] [--peers none]

Everybody computes the log-probabilities [T] of given tokens from bf16 hidden states [T, H] and a bf16 head [V, H],
and the gradients of their sum. One JSON line for the run (shape, machine, GEMM rate), one for each contender, and
one with the targets and whether they were met. Contenders take turns within each round; figures are medians.

forward, total      seconds of the forward pass and of forward plus backward (a loss inside the chunk computes its
                    gradients in the forward pass)
gemm_share          of the rate of a large bf16 GEMM in the same run, for the GEMMs that this contender computes
extra_mib           peak memory above what the operands take, gradients of hidden and head among it. On a CPU: the
                    resident set's peak in a process of its own, as the kernel counts it; on a GPU: the allocator's
block_mib           the same without the gradients that are handed out
error               largest distance from fp64 (nats), over the first tokens
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_scalerl.environment import explained

SHAPES = {"cpu": (4096, 1024, 32768), "gpu": (16384, 4096, 128256)}
"""Tokens, hidden size and vocabulary of the targets."""


def parser() -> argparse.ArgumentParser:
    """The options; without sizes those of SHAPES."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    for name, cpu, gpu in zip(("tokens", "hidden", "vocab"), *SHAPES.values()):
        p.add_argument(f"--{name}", type=int, help=f"default {cpu}, on a GPU {gpu}")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--backend", help="of ours, only those of this backend")
    p.add_argument("--peers", choices=("all", "none"), default="all")
    p.add_argument("--memory-of", help=argparse.SUPPRESS)
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from megatron_scalerl.logits import token_logprobs
    from megatron_scalerl.logits.api import token_loss

CHECKED_TOKENS = 64
THIRD, SIXTH, CHUNK = 512, 96, 512
"""MiB of workspace on a CPU: a third and a sixth of the naive path's extra memory, and with the loss in the chunk."""

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(hidden, weight, targets) -> the sum of log-probabilities, or of their negatives, and each one if it has them."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Somebody who computes the log-probabilities."""

    name: str
    run: Run
    gemms: float = 3
    """GEMMs of 2 T H V operations, forward and backward; one of them forward unless `all_forward`."""
    all_forward: bool = False
    main_grad: bool = False
    """The head's gradient goes to an fp32 buffer that is there before."""


def ours(name: str, backend: str, room: float, *, inside: bool = False, grad_logits: Any = "bf16") -> Contender:
    """This project's projection by a backend; `inside`: with the loss in the chunk."""
    main_grad = grad_logits == "bf16x2"

    def in_two_passes(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"workspace_mb": room, "backend": backend, "main_grad": main_grad}
        logprob, _ = token_logprobs(h, w, y, grad_logits=grad_logits, **options)
        return logprob.sum(), logprob

    def in_the_chunk(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total, logprob, _ = token_loss(h, w, y, lambda lp, _, at: lp.sum(), workspace_mb=room, backend=backend)
        return total, logprob

    gemms = 3 if inside else 4 + main_grad
    run = in_the_chunk if inside else in_two_passes
    return Contender(name=name, run=run, gemms=gemms, all_forward=inside, main_grad=main_grad)


def naive_fp32(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 products, all log-probabilities kept; logits are let go as soon as autograd allows."""
    logprob = (h.float() @ w.float().t()).log_softmax(-1).gather(1, y[:, None])[:, 0]
    return logprob.sum(), logprob


def naive_bf16(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 logits, cross-entropy of all of them."""
    logprob = -F.cross_entropy(h @ w.t(), y, reduction="none")
    return logprob.sum(), logprob


def torch_linear(chunked: bool) -> Run:
    """PyTorch's own fused function: the reference path, or the chunked one (a scalar loss with gradients inside)."""

    def run(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        if chunked:
            chunks = torch.nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(h, w, y, reduction="sum", options=chunks), None
        loss = F.linear_cross_entropy(h, w, y, reduction="none")
        return loss.sum(), -loss

    return run


def liger(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, None]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(h, w, y, reduction="sum"), None


def cut_cross_entropy(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    from cut_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(h, w, y, reduction="none", impl="cce", filter_eps=None)
    return loss.sum(), -loss


def quack(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, None]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(h, w, y, reduction="sum"), None


def verl(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(h, w, y, 1.0, "none")[0]
    return loss.sum(), -loss.abs()


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Who takes part, the naive path first."""
    naive = Contender(name=NAIVE, run=naive_fp32)
    if options.device == "cpu":
        mine = [ours(f"torch, {room} MiB", "torch", room) for room in (THIRD, SIXTH)]
        mine.append(ours(f"torch, loss in the chunk, {CHUNK} MiB", "torch", CHUNK, inside=True))
        peers = [
            Contender(name="torch linear_cross_entropy", run=torch_linear(False)),
            Contender(name="torch linear_cross_entropy, chunked", run=torch_linear(True), all_forward=True),
        ]
    else:
        mine = [ours(name, name, 512) for name in ("cuda", "triton", "torch")]
        mine.append(ours("cuda, bf16x2 into main_grad", "cuda", 512, grad_logits="bf16x2"))
        mine.append(ours("cuda, loss in the chunk", "cuda", 512, inside=True))
        peers = [
            Contender(name="naive, bf16 logits", run=naive_bf16),
            Contender(name="Liger", run=liger, all_forward=True),
            Contender(name=CCE, run=cut_cross_entropy, gemms=4),
            Contender(name="QuACK", run=quack, all_forward=True),
            Contender(name="verl", run=verl, gemms=4),
        ]
    if options.backend is not None:
        mine = [contender for contender in mine if contender.name.split(",")[0] == options.backend]
    return [naive, *mine, *(peers if options.peers == "all" else [])]


class Bench:
    """The operands, and how to measure on this device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.on_gpu = options.device == "gpu"
        if self.on_gpu and not torch.accelerator.is_available():
            raise SystemExit("bench_logits: expected a GPU for --device gpu, found none that PyTorch sees")
        self.device = torch.accelerator.current_accelerator() if self.on_gpu else torch.device("cpu")
        torch.set_num_threads(options.threads)
        generator = torch.Generator().manual_seed(0)
        shape = (options.tokens, options.hidden), (options.vocab, options.hidden)
        h, w = (torch.randn(size, generator=generator).bfloat16() for size in shape)
        # Logits of spread 4: a peaked distribution, |z| below 25.
        self.h = h.to(self.device).requires_grad_()
        self.w = (w * (4.0 / options.hidden**0.5)).to(self.device).requires_grad_()
        self.y = torch.randint(0, options.vocab, (options.tokens,), generator=generator).to(self.device)
        size = 8192 if self.on_gpu else min(2048, max(64, options.vocab // 16))
        self.square = torch.ones(size, size, dtype=torch.bfloat16, device=self.device)

    def step(self, contender: Contender, *, backward: bool) -> tuple[float, float, Tensor | None]:
        """Seconds of wall and processor for one pass, and log-probabilities if there are any."""
        self.forget(contender)
        self.wait()
        wall, busy = time.perf_counter(), time.process_time()
        total, logprob = contender.run(self.h, self.w, self.y)
        if backward:
            total.backward()
        self.wait()
        return time.perf_counter() - wall, time.process_time() - busy, logprob

    def forget(self, contender: Contender) -> None:
        self.h.grad = self.w.grad = None
        if contender.main_grad and getattr(self.w, "main_grad", None) is None:
            self.w.main_grad = torch.zeros_like(self.w, dtype=torch.float32)
            self.w.grad_added_to_main_grad = False
        elif not contender.main_grad:
            self.w.main_grad = None

    def wait(self) -> None:
        if self.on_gpu:
            torch.accelerator.synchronize()

    def error(self, logprob: Tensor | None) -> float | None:
        """Largest distance from fp64 over the first tokens (nats)."""
        if logprob is None:
            return None
        n = min(CHECKED_TOKENS, self.options.tokens)
        with torch.no_grad():
            exact = (self.h[:n].double() @ self.w.double().t()).log_softmax(-1).gather(1, self.y[:n, None])[:, 0]
            return (logprob[:n].double() - exact).abs().max().item()

    def gemm_seconds(self) -> float:
        """Of one large square bf16 GEMM."""
        self.wait()
        start = time.perf_counter()
        self.square @ self.square
        self.wait()
        return time.perf_counter() - start

    def peak_extra(self, contender: Contender) -> dict[str, float]:
        """MiB above the operands: forward, and forward plus backward."""
        self.forget(contender)
        if not self.on_gpu:  # a few tokens first: code that is loaded once is nobody's memory
            h, w = (t.detach()[:64].requires_grad_() for t in (self.h, self.w))
            contender.run(h, w, self.y[:64] % 64)[0].backward()
        before, found = self._reset_peak(), {}
        for name, backward in (("extra_mib_forward", False), ("extra_mib", True)):
            self._reset_peak()
            self.step(contender, backward=backward)
            found[name] = (self._peak() - before) / 2**20
        handed_out = self.h.numel() * 2 + (0 if contender.main_grad else self.w.numel() * 2)
        found["block_mib"] = found["extra_mib"] - handed_out / 2**20
        return found

    def _reset_peak(self) -> int:
        if self.on_gpu:
            torch.accelerator.reset_peak_memory_stats()
            return torch.accelerator.memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, proc_pid_clear_refs(5)
        return _resident("VmRSS")

    def _peak(self) -> int:
        return torch.accelerator.max_memory_allocated() if self.on_gpu else _resident("VmHWM")


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def memory_of(contender: Contender, options: argparse.Namespace, bench: Bench) -> dict[str, float]:
    """`Bench.peak_extra`, on a CPU in a process that has done nothing else."""
    if bench.on_gpu:
        return bench.peak_extra(contender)
    flags = [f"--{name}={getattr(options, name)}" for name in ("device", "tokens", "hidden", "vocab", "threads")]
    command = [sys.executable, __file__, *flags, f"--memory-of={contender.name}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(bench: Bench, options: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    """Operations per second of the large GEMM, and one line for each contender."""
    able: list[Contender] = []
    lines: dict[str, dict[str, Any]] = {}
    for contender in contenders(options):
        lines[contender.name] = line = {"bench": "logits", "contender": contender.name, "status": "measured"}
        try:
            line["error"] = bench.error(bench.step(contender, backward=True)[2])  # and warms up
            able.append(contender)
        except ImportError as error:
            line["status"] = f"not installed ({error.name})"
        except (RuntimeError, TypeError, ValueError) as error:
            line["status"] = f"failed: {str(error).splitlines()[0][:200]}"
    seconds: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    bench.gemm_seconds()
    gemms: list[float] = []
    for _ in range(options.rounds):
        for contender in able:
            gemms.append(bench.gemm_seconds())
            for backward in (False, True):
                taken = bench.step(contender, backward=backward)[:2]
                seconds.setdefault((contender.name, backward), []).append(taken)
    rate = 2.0 * bench.square.shape[0] ** 3 / statistics.median(gemms)
    gemm = 2.0 * options.tokens * options.hidden * options.vocab / rate
    for contender in able:
        line = lines[contender.name]
        for name, backward in (("forward", False), ("total", True)):
            walls, busy = zip(*seconds[contender.name, backward])
            line[f"{name}_seconds"] = statistics.median(walls)
            line[f"{name}_cpu_seconds"] = statistics.median(busy)
            line[f"{name}_spread"] = [min(walls), max(walls)]
        line["gemms"] = contender.gemms
        gemms_forward = contender.gemms if contender.all_forward else 1
        line["gemm_share_forward"] = gemms_forward * gemm / line["forward_seconds"]
        line["gemm_share"] = contender.gemms * gemm / line["total_seconds"]
        line.update(memory_of(contender, options, bench))
    return rate, [_rounded(line) for line in lines.values()]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


NAIVE, CCE = "naive, fp32 logits", "cut_cross_entropy, no filter"
Target = tuple[str, str, str | None, float]
"""Contender, figure, over whose, and the most it may be; where negative, the least."""

CPU_TARGETS: list[Target] = [
    (f"torch, {THIRD} MiB", "total_seconds", NAIVE, 1.15),
    (f"torch, {THIRD} MiB", "extra_mib", NAIVE, 1 / 3),
    (f"torch, {SIXTH} MiB", "total_seconds", NAIVE, 1.3),
    (f"torch, {SIXTH} MiB", "extra_mib", NAIVE, 1 / 6),
    (f"torch, loss in the chunk, {CHUNK} MiB", "total_seconds", NAIVE, 1.0),
    (f"torch, loss in the chunk, {CHUNK} MiB", "extra_mib", NAIVE, 1 / 3),
    (f"torch, {THIRD} MiB", "error", None, 5e-5),
]
GPU_TARGETS: list[Target] = [
    ("cuda", "gemm_share_forward", None, -0.75),
    ("cuda", "gemm_share", None, -0.78),
    ("cuda", "extra_mib_forward", None, 512.0),
    ("cuda", "block_mib", None, 1024.0),
    ("cuda", "total_seconds", "Liger", 0.5),
    ("cuda", "total_seconds", CCE, 1.0),
    ("cuda", "total_seconds", "naive, bf16 logits", 1.25),
    ("cuda", "error", None, 5e-5),
    ("triton", "error", None, 5e-5),
]


def targets(lines: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Each target with what was found; `met` is None where somebody was not measured."""
    by_name = {line["contender"]: line for line in lines if line["status"] == "measured"}
    result = []
    for name, figure, other, limit in CPU_TARGETS if device == "cpu" else GPU_TARGETS:
        found = met = None
        if name in by_name and (other is None or other in by_name):
            found = by_name[name][figure] / (1.0 if other is None else by_name[other][figure])
            met = found <= limit if limit > 0 else found >= -limit
        what = figure if other is None else f"{figure} over {other}"
        bound = f"{'<=' if limit > 0 else '>='} {abs(limit):.4g}"
        result.append({"contender": name, "what": what, "target": bound, "found": _rounded(found), "met": met})
    return result


def machine(device: str) -> dict[str, Any]:
    """What this ran on, and how busy it was."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", info.read_text() if info.is_file() else "", re.MULTILINE)
    found: dict[str, Any] = {"cpu": model[1] if model else platform.machine(), "cores": os.cpu_count()}
    if device == "gpu":
        found["gpu"] = torch.get_device_module(torch.accelerator.current_accelerator()).get_device_name()
    return {**found, "load_average": round(os.getloadavg()[0], 2), "torch": torch.__version__}


def main(options: argparse.Namespace) -> None:
    for name, default in zip(("tokens", "hidden", "vocab"), SHAPES[options.device]):
        setattr(options, name, getattr(options, name) or default)
    bench = Bench(options)
    if options.memory_of is not None:
        [contender] = [c for c in contenders(options) if c.name == options.memory_of]
        return print(json.dumps(bench.peak_extra(contender)))
    shape = {name: getattr(options, name) for name in ("device", "rounds", "tokens", "hidden", "vocab", "threads")}
    found = machine(options.device)
    rate, lines = measure(bench, options)
    first = {"bench": "logits", "dtype": "bfloat16", **shape, "gemm_tflops": _rounded(rate / 1e12), "machine": found}
    for line in (first, *lines, {"bench": "logits", "targets": targets(lines, options.device)}):
        print(json.dumps(line))


if __name__ == "__main__":
    main(OPTIONS)

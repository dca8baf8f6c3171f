"""Time, memory and error of the logit projection compared with other implementations, in one run.

    python tools/bench_logits.py [--device cpu|gpu] [--tokens T] [--hidden H] [--vocab V] [--rounds N] [--threads N]
                                 [--peers none]

Every contender computes the log-probs [T] of given tokens from bf16 hidden states [T, H] and a bf16 head [V, H], and
the gradients of their sum. Prints one JSON line for the run (shape, machine, GEMM rate) and one per contender.
Figures are medians. Our backends and the naive paths take turns within each round. Each other contender runs in a
separate process afterwards with its own GEMM rate, so that its failure affects only its own line.

forward, total      seconds of the forward pass and of forward plus backward (a loss inside the chunk computes its
                    gradients in the forward pass)
gemm_share          of the rate of bare GEMMs in the same process (gemm_tflops), for the GEMMs that this contender
                    computes, those that compute logits a second time among them. On a GPU one large bf16 GEMM; on a
                    CPU the three of a block of this shape, taking turns with the contenders, in the fastest of WAYS
                    (gemm_ways_tflops): without a matrix unit bf16 may be the slower type. Operands are drawn as
                    hidden and head are, since constant ones multiply faster on a GPU
necessary_share     the same for the three GEMMs that nobody can do without: logits and both gradients
extra_mib           peak memory above what the operands take, gradients of hidden and head among it. On a CPU: the
                    resident set's peak in a separate process, as the kernel counts it; on a GPU: the allocator's
block_mib           the same without the gradients that are handed out
error               largest distance from fp64 (nats), over the first tokens
"""

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import harness
from checkout import explained

SIZES = ("tokens", "hidden", "vocab")
SHAPES = {"cpu": (4096, 1024, 32768), "gpu": (16384, 4096, 128256)}
"""Tokens, hidden size and vocabulary."""
parser = harness.benchmark(
    __doc__,
    device=["cpu", "gpu"],
    **{name: (int, f"default {cpu}, on a GPU {gpu}") for name, cpu, gpu in zip(SIZES, *SHAPES.values())},
    rounds=5,
    threads=os.cpu_count(),
    peers=["all", "none"],
    apart=(str, argparse.SUPPRESS),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import torch
    import torch.nn.functional as F
    from bench_shapes import memory, reset_peaks
    from torch import Tensor

    from megatron_scalerl.logits.api import token_logprobs, token_loss
    from megatron_scalerl.logits.exact import fp32_products

CHECKED_TOKENS = 64
BLOCK = 4096
"""Tokens and columns of the bare GEMMs on a CPU."""
WAYS = {
    "bf16": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "fp32, may round to bf16": (torch.float32, True),
}
"""How GEMMs of operands with bf16 values are computed: type of operands and result, and whether a CPU may round the
operands to bf16 (exact here), which it does where that is faster (`exact.fp32_products`)."""
Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(hidden, weight, targets) -> the sum of log-probabilities or of their negatives, and each of them if available."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An implementation of the projection."""

    name: str
    run: Run
    gemms: float = 3
    """GEMMs of 2 T H V operations, forward and backward; one of them forward unless `all_forward`."""
    all_forward: bool = False
    main_grad: bool = False
    """The head's gradient is added to a preallocated fp32 buffer."""
    package: str = ""
    """Of another project's code, which runs in a process of its own."""


def _ours(name, backend, room, *, inside=False, grad_logits="bf16"):
    """This project's projection with one backend; `inside`: with the loss in the chunk.

    In two passes the head's gradient is added to an fp32 main_grad, as in the trainer: without one it would be summed
    in fp32 first.
    """

    def in_two_passes(h, w, y):
        logprob, _ = token_logprobs(h, w, y, grad_logits=grad_logits, workspace_mb=room, backend=backend)
        return logprob.sum(), logprob

    def in_the_chunk(h, w, y):
        total, logprob, _ = token_loss(h, w, y, lambda lp, _, at: lp.sum(), workspace_mb=room, backend=backend)
        return total, logprob

    if inside:
        return Contender(name=name, run=in_the_chunk, all_forward=True)
    gemms = 5 if grad_logits == "bf16x2" else 4
    return Contender(name=name, run=in_two_passes, gemms=gemms, main_grad=True)


def _naive_fp32(h, w, y):
    """fp32 products, all log-probabilities kept; logits are freed as soon as autograd allows."""
    logprob = (h.float() @ w.float().t()).log_softmax(-1).gather(1, y[:, None])[:, 0]
    return logprob.sum(), logprob


def _naive_bf16(h, w, y):
    """bf16 logits, cross-entropy of all of them."""
    logprob = -F.cross_entropy(h @ w.t(), y, reduction="none")
    return logprob.sum(), logprob


def _torch_linear(h, w, y):
    """PyTorch's own function."""
    loss = F.linear_cross_entropy(h, w, y, reduction="none")
    return loss.sum(), -loss


def _liger(h, w, y):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(h, w, y, reduction="sum"), None


def _cut_cross_entropy(h, w, y):
    from cut_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(h, w, y, reduction="none", impl="cce", filter_eps=None)
    return loss.sum(), -loss


def contenders(options):
    """The implementations to compare: ours, the naive paths, then peers."""
    naive = [Contender(name="naive, fp32 logits", run=_naive_fp32)]
    if options.device == "cpu":
        mine = [_ours(f"torch, {room} MiB", "torch", room) for room in (512, 96)]
        mine.append(_ours("torch, loss in the chunk, 512 MiB", "torch", 512, inside=True))
        peers = [Contender(name="torch linear_cross_entropy", run=_torch_linear, package="torch")]
    else:
        mine = [_ours(name, name, 512) for name in ("cuda", "torch")]
        mine.append(_ours("cuda, bf16x2", "cuda", 512, grad_logits="bf16x2"))
        mine.append(_ours("cuda, loss in the chunk", "cuda", 2048, inside=True))
        naive.append(Contender(name="naive, bf16 logits", run=_naive_bf16))
        peers = [
            Contender(name="Liger", run=_liger, all_forward=True, package="liger_kernel"),
            Contender(
                name="cut_cross_entropy, no filter",
                run=_cut_cross_entropy,
                gemms=4,
                package="cut_cross_entropy",
            ),
        ]
    if options.peers == "none":
        peers = []
    return [*mine, *naive, *peers]


class BareGemms:
    """The rate of GEMMs alone, in each way."""

    def __init__(self, bench):
        self.bench = bench
        options = bench.options
        ways = WAYS
        if bench.on_gpu:
            pairs = [(bench.drawn(8192, 8192), bench.drawn(8192, 8192) * bench.spread)]
            ways = {"bf16": WAYS["bf16"]}
        else:
            tokens = min(BLOCK, options.tokens)
            columns = min(BLOCK, options.vocab)
            h = bench.drawn(tokens, options.hidden)
            w = bench.drawn(columns, options.hidden) * bench.spread
            dz = bench.drawn(tokens, columns)
            pairs = [(h, w.t()), (dz, w), (dz.t(), h)]
        self.flop = sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in pairs)
        self.work = {
            name: (rounds, [(a.to(t), b.to(t), (a @ b).to(t)) for a, b in pairs])
            for name, (t, rounds) in ways.items()
        }
        self.seconds = {name: [] for name in ways}

    def measure(self):
        """Once in each way; on a GPU the mean of some in a row, so that no launch is waited for."""
        count = 10 if self.bench.on_gpu else 1
        for name, (rounds, products) in self.work.items():
            with fp32_products(self.bench.device, of_bf16=rounds):
                self.bench.wait()
                start = time.perf_counter()
                for _ in range(count):
                    for a, b, out in products:
                        torch.mm(a, b, out=out)
                self.bench.wait()
                self.seconds[name].append((time.perf_counter() - start) / count)

    def tflops(self):
        """Rates by way, from the median; the first measurement warmed up."""
        return {name: self.flop / statistics.median(taken[1:]) / 1e12 for name, taken in self.seconds.items()}


class Bench:
    """The operands, and how to measure on this device."""

    def __init__(self, options):
        self.options = options
        self.on_gpu = options.device == "gpu"
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.accelerator.current_accelerator()
        torch.set_num_threads(options.threads)
        self.generator = torch.Generator(self.device).manual_seed(0)
        # Logits of spread 4: a peaked distribution, |z| below 25.
        self.spread = 4.0 / options.hidden**0.5
        self.h = self.drawn(options.tokens, options.hidden).requires_grad_()
        self.w = (self.drawn(options.vocab, options.hidden) * self.spread).requires_grad_()
        self.y = torch.randint(0, options.vocab, (options.tokens,), generator=self.generator, device=self.device)

    def drawn(self, *size):
        """Normally distributed, bf16."""
        return torch.randn(size, generator=self.generator, device=self.device).bfloat16()

    def run(self, contender, *, backward):
        """One pass; log-probabilities if there are any."""
        total, logprob = contender.run(self.h, self.w, self.y)
        if backward:
            total.backward()
        self.wait()
        return logprob

    def timed(self, contender, *, backward):
        """Seconds of one pass."""
        self.forget(contender)
        self.wait()
        return harness.seconds_of(partial(self.run, contender, backward=backward))

    def forget(self, contender):
        self.h.grad = self.w.grad = None
        if contender.main_grad and getattr(self.w, "main_grad", None) is None:
            self.w.main_grad = torch.zeros_like(self.w, dtype=torch.float32)
            self.w.grad_added_to_main_grad = False
        elif not contender.main_grad:
            self.w.main_grad = None

    def wait(self):
        if self.on_gpu:
            torch.accelerator.synchronize()

    def error(self, contender):
        """Largest distance from fp64 over the first tokens (nats), None for a sum alone. It warms up."""
        self.forget(contender)
        logprob = self.run(contender, backward=True)
        if logprob is None:
            return None
        n = min(CHECKED_TOKENS, self.options.tokens)
        with torch.no_grad():
            exact = (self.h[:n].double() @ self.w.double().t()).log_softmax(-1).gather(1, self.y[:n, None])[:, 0]
            return (logprob[:n].double() - exact).abs().max().item()

    def peak_extra(self, contender):
        """MiB above the operands: forward, and forward plus backward."""
        self.forget(contender)
        if not self.on_gpu:  # a few tokens first: code that is loaded once is nobody's memory
            h, w = (t.detach()[:64].requires_grad_() for t in (self.h, self.w))
            contender.run(h, w, self.y[:64] % 64)[0].backward()
        before = memory().allocated
        measures = {}
        for name, backward in (("extra_mib_forward", False), ("extra_mib", True)):
            reset_peaks()
            self.forget(contender)
            self.run(contender, backward=backward)
            measures[name] = (memory().peak_allocated - before) / 2**20
        handed_out = self.h.numel() * 2
        if not contender.main_grad:
            handed_out += self.w.numel() * 2
        measures["block_mib"] = measures["extra_mib"] - handed_out / 2**20
        return measures


def group(options, *names):
    """Figures of the run, and a line for each of these contenders, in turns within each round."""
    chosen = [contender for contender in contenders(options) if contender.name in names]
    bench = Bench(options)
    lines = {}
    for contender in chosen:
        lines[contender.name] = line_of(contender.name, "measured") | {"error": bench.error(contender)}
    bare = BareGemms(bench)
    bare.measure()

    def turn(contender):
        bare.measure()
        return [bench.timed(contender, backward=backward) for backward in (False, True)]

    arms = {contender.name: partial(turn, contender) for contender in chosen}
    taken = harness.in_rounds(arms, options.rounds, warm_up=0)
    ways = bare.tflops()
    rate = max(ways.values())
    gemm = 2.0 * options.tokens * options.hidden * options.vocab / rate / 1e12
    for contender in chosen:
        line = lines[contender.name]
        for name, seconds in zip(("forward", "total"), zip(*taken[contender.name])):
            line[f"{name}_seconds"] = statistics.median(seconds)
            line[f"{name}_spread"] = [min(seconds), max(seconds)]
        gemms_forward = 1
        if contender.all_forward:
            gemms_forward = contender.gemms
        line |= {"gemms": contender.gemms, "gemm_tflops": rate}
        line["gemm_share_forward"] = gemms_forward * gemm / line["forward_seconds"]
        line["gemm_share"] = contender.gemms * gemm / line["total_seconds"]
        line["necessary_share"] = 3 * gemm / line["total_seconds"]
        if bench.on_gpu:
            line |= bench.peak_extra(contender)
    run = {"dtype": "bfloat16", "gpus": harness.gpu_names(), "gemm_tflops": rate, "gemm_ways_tflops": ways}
    return {"run": run, "lines": list(lines.values())}


def peak(options, name):
    """`Bench.peak_extra` of one contender in this process, which has done nothing else."""
    [contender] = [c for c in contenders(options) if c.name == name]
    return Bench(options).peak_extra(contender)


def line_of(name, status):
    return {"contender": name, "status": status}


def apart(options, work, *names):
    """What `group` or `peak` returns, in a separate process. Raises RuntimeError if it fails."""
    asked = {**harness.asked(options), "apart": json.dumps([work.__name__, *names])}
    variables = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    return harness.child(__file__, *(f"--{name}={value}" for name, value in asked.items()), **variables)


def measured(options, *names):
    """Figures of the run and lines of contenders that share a process. Raises RuntimeError if it fails."""
    found = apart(options, group, *names)
    if options.device == "cpu":
        for line in found["lines"]:
            line |= apart(options, peak, line["contender"])
    return found


def main(options):
    """Measure all contenders and print."""
    for name, default in zip(SIZES, SHAPES[options.device]):
        setattr(options, name, getattr(options, name) or default)
    if options.device == "gpu" and not torch.accelerator.is_available():
        parser().error("--device gpu: PyTorch sees no GPU")
    if options.apart:
        work, *names = json.loads(options.apart)
        print(json.dumps({"group": group, "peak": peak}[work](options, *names)))
        return
    everybody = contenders(options)
    found = measured(options, *(c.name for c in everybody if not c.package))
    for line in (found["run"], *found["lines"]):
        harness.report(options, line)
    for contender in everybody:
        if contender.package:
            harness.report(options, peer_line(options, contender))


def peer_line(options, contender):
    """The line of a peer implementation, measured in a separate process."""
    if importlib.util.find_spec(contender.package) is None:
        return line_of(contender.name, f"not installed ({contender.package})")
    try:
        return measured(options, contender.name)["lines"][0]
    except RuntimeError as error:
        return line_of(contender.name, f"failed: {error}")


if __name__ == "__main__":
    main(OPTIONS)

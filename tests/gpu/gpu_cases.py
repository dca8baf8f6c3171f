"""Small random policies with fixed sequences, one step of transformers on them, and tolerances between two steps.

If bf16 rounding makes a router select another expert, the log-prob of a token changes a lot. Therefore mixtures of
experts are compared by the median. Weights are stored in bf16, so that both precisions start from the same ones.
"""

import math
import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import random_policies
import torch
from random_policy import make_recipe

from megatron_scalerl.types import Rollout, Sample

if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Megatron-Core would take their optimizers, which need a GPU
    for package in ("transformer_engine", "apex"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]

KINDS = ("llama", "qwen3", "qwen3_moe", "llama4", "kimi")
MIXTURES = ("qwen3_moe", "llama4", "kimi")
_WIDE = dict(vocab_size=1024, hidden_size=512, intermediate_size=1024, num_attention_heads=8)
_WIDE |= dict(num_key_value_heads=2, head_dim=64, max_position_embeddings=2048)
_WIDER = {
    "qwen3_moe": dict(moe_intermediate_size=384),
    "llama4": dict(intermediate_size=512, intermediate_size_mlp=768, attention_chunk_size=128, floor_scale=64),
    "kimi": dict(random_policies.LATENT_ON_GPUS, moe_intermediate_size=384, num_key_value_heads=8),
}
"""Widths that flash attention and Transformer Engine support, also with TP 2."""
_CUTS = {
    "TP2": {"parallel": {"tensor_model_parallel_size": 2}, "model": {"sequence_parallel": True}},
    "PP2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "EP2": {"parallel": {"expert_model_parallel_size": 2}},
    "CP2": {"parallel": {"context_parallel_size": 2}},
}
"""Section `megatron` by layout; DP2 and a single rank have none."""
_TIE = 3e-5
"""Smallest gap between router logits of the last selected expert and the next one. With smaller gaps fp32 rounding
(about 2e-6) may change the selection; such sequences are redrawn."""
FP32 = 1e-4
"""Nats between log-probs in fp32; also relative, of loss and gradient norm."""
ONE_BF16, TWO_BF16 = 1.5, 2.0
"""Bound of our bf16 error, and of the difference of two bf16 results, relative to the error of transformers' bf16."""
BF16_LOSS, BF16_NORM = 0.01, 0.02
"""Of the loss in nats (its weights add up to 1), and of the gradient norm, relative; twice that with experts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A policy, sequences, and how one step on them is made."""

    kind: str
    path: Path
    vocab: int
    lengths: tuple[int, ...]
    """Targets per sequence; each sequence has one token more."""
    micro_batch_tokens: int
    """More than the longest sequence, less than all together."""
    seed: int = 3
    dtype: str = "float32"
    layout: str = ""
    world_size: int = 1
    lr: float = 1e-3
    lora: bool = False
    """Adapters alone are trained."""
    deterministic: bool = False
    capped: bool = False
    """The engine's log-probs are random, so that some importance weights are capped; else the trainer's own."""

    def token_ids(self):
        """The sequences; deterministic."""
        rng = random.Random(self.seed)
        return [[rng.randrange(3, self.vocab) for _ in range(length + 1)] for length in self.lengths]

    def samples(self, logprobs=None):
        """One per sequence, whose first token is the prompt. logprobs: the engine's; random by default."""
        ids, rng = self.token_ids(), np.random.default_rng(5)
        if logprobs is None:
            logprobs = [(-8.0 * rng.random(len(row) - 1)).tolist() for row in ids]
        weight = 1.0 / sum(self.lengths)
        return [
            Sample(
                prompt_token_ids=tuple(row[:1]),
                rollout=rollout_of(row[1:], found),
                advantage=1.0 if index % 3 else -0.5,
                token_weight=weight,
            )
            for index, (row, found) in enumerate(zip(ids, logprobs, strict=True))
        ]

    def recipe(self):
        """Its first step is smooth in the gradient: with a small eps Adam's first update is the gradient's sign."""
        return make_recipe(
            self.path,
            policy={"dtype": self.dtype, "lora": {"rank": 4} if self.lora else None},
            optimizer={"lr": self.lr, "warmup_steps": 0, "eps": 1e-3, "clip_grad": 1.0},
            trainer={
                "micro_batch_tokens": self.micro_batch_tokens,
                "world_size": self.world_size,
                "deterministic": self.deterministic,
            },
            megatron=_CUTS.get(self.layout, {}),
        )


def rollout_of(completion, logprobs):
    """A completion of policy version 0 with loss on all tokens."""
    size = len(completion)
    tokens = dict(token_ids=tuple(completion), rollout_logprobs=tuple(logprobs), policy_versions=(0,) * size)
    return Rollout(**tokens, loss_mask=(True,) * size, interrupted=False, truncated=False, thinking_cut=0, seed=0)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Log-probs before and after the first step, and its report."""

    logprobs: np.ndarray
    """[T] nats"""
    loss: float
    grad_norm: float
    after: np.ndarray | None = None
    gradient: np.ndarray | None = None
    """[P] fp32, clipped; of one rank, where `Case.capped`."""
    weights: np.ndarray | None = None
    """[P] fp32, after the step; the same."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case without ties of router logits, and transformers' step."""

    case: Case
    exact: Step
    """In fp32 on the CPU."""
    own: float
    """bf16 error of transformers, nats (`typical`)."""


def prepare(kind, device, path):
    """Write the policy into `path` and make transformers' steps with it. device: "cpu" is toy size."""
    settings = {} if device == "cpu" else _WIDE | _WIDER.get(kind, {})
    random_policies.make(kind, path, dtype=torch.bfloat16, std=0.3 if device == "cpu" else 0.08, **settings)
    torch.set_num_threads(min(torch.get_num_threads(), 8))  # it counts the host's cores, a container may have few
    lengths = (40, 5, 31, 12, 1, 24) if device == "cpu" else (59, 16, 128, 199, 63, 32, 89, 1, 120)
    case = Case(
        kind=kind,
        path=path,
        vocab=settings.get("vocab_size", random_policies.VOCAB),
        lengths=lengths,
        micro_batch_tokens=80 if device == "cpu" else 256,
    )
    for seed in range(3, 23):
        case = replace(case, seed=seed)
        exact, gap = in_transformers(case, torch.float32)
        if gap > _TIE:
            rounded, _ = in_transformers(case, torch.bfloat16)
            return Prepared(case=case, exact=exact, own=typical(kind, rounded.logprobs, exact.logprobs))
    raise AssertionError(f"{kind}: expected sequences without ties of router logits, found none in 20 draws")


def in_transformers(case, dtype):
    """(log-probs of transformers, and loss and gradient of a step whose ratios are all 1; the smallest router gap).

    On the CPU with its eager implementations. The model is loaded in `dtype`: converting a built model to bf16 would
    round its rotary frequencies.
    """
    from transformers import AutoModelForCausalLM

    plain = {"experts_implementation": "eager"} if case.kind in MIXTURES else {}
    model = AutoModelForCausalLM.from_pretrained(
        case.path, dtype=dtype, trust_remote_code=False, attn_implementation="eager", **plain
    ).eval()
    assert not plain or model.config._experts_implementation == "eager"
    gaps = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("router", "gate"):
            module.register_forward_hook(_watch(gaps, model.config.num_experts_per_tok))
    logprobs, loss = [], 0.0
    for row, sample in zip(case.token_ids(), case.samples()):
        tokens = torch.tensor([row])
        found = model(input_ids=tokens[:, :-1]).logits[0].float().log_softmax(-1).gather(1, tokens[0, 1:, None])
        term = -sample.token_weight * sample.advantage * found.sum()
        term.backward()
        loss += term.item()
        logprobs.append(found.detach().double()[:, 0])
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    return Step(logprobs=torch.cat(logprobs).numpy(), loss=loss, grad_norm=norm), min(gaps, default=math.inf)


def _watch(gaps, chosen):
    def watch(router, inputs, _):
        logits = torch.nn.functional.linear(inputs[0].detach().flatten(0, -2), router.weight.detach())
        bias = getattr(router, "e_score_correction_bias", None)
        if bias is not None:
            logits = logits.sigmoid() + bias
        ranked = logits.sort(dim=-1, descending=True).values
        gaps.append(float((ranked[:, chosen - 1] - ranked[:, chosen]).min()))

    return watch


def judge(record, distances):
    """Every distance is within its bound; the one nearest to it is recorded."""
    shares = {name: found / bound if math.isfinite(found) else math.inf for name, (found, bound) in distances.items()}
    worst = max(shares, key=lambda name: shares[name])
    record("nearest to its bound", f"{worst} {distances[worst][0]:.2g} (<= {distances[worst][1]:.2g})")
    beyond = {name: distances[name] for name, share in shares.items() if share > 1}
    assert not beyond, f"expected distances within their bounds, found (distance, bound) {beyond}"


def relative(found, expected):
    """L2 norm of the difference over the L2 norm of `expected`, in fp64."""
    a, b = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert a.shape == b.shape
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def typical(kind, found, other):
    """Mean absolute difference; the median for a mixture of experts."""
    return float((np.median if kind in MIXTURES else np.mean)(np.abs(found - other)))


def fp32_distances(found, exact):
    """Two steps in fp32."""
    return {
        "fp32 log-probs": (float(np.abs(found.logprobs - exact.logprobs).max()), FP32),
        "fp32 loss": (relative(found.loss, exact.loss), FP32),
        "fp32 gradient norm": (relative(found.grad_norm, exact.grad_norm), FP32),
    }


def bf16_distances(kind, found, other, bound):
    """A step in bf16 and one in fp32, or two in bf16 with different layers or layouts. bound: nats."""
    more = 2 if kind in MIXTURES else 1
    return {
        "bf16 log-probs": (typical(kind, found.logprobs, other.logprobs), bound),
        "bf16 loss": (abs(found.loss - other.loss), more * BF16_LOSS),
        "bf16 gradient norm": (relative(found.grad_norm, other.grad_norm), more * BF16_NORM),
    }

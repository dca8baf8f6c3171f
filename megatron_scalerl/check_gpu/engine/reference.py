"""Random policies for the engine's checks, their log-probs by transformers on the CPU, and tolerances.

Every matrix preserves the variance of its input, and the logits have a standard deviation of 3: distributions are
neither uniform nor deterministic, so that a wrong kernel changes the log-probs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_scalerl.check_gpu.findings import Recorder, finite
from megatron_scalerl.controller.probe import TOLERANCE
from megatron_scalerl.tiny.families import make
from megatron_scalerl.tiny.tokenizer import BOS_ID, EOS_ID, PAD_ID, save_tokenizer
from megatron_scalerl.types import Rollout

LOGIT_STD = 3.0
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "rms_norm_eps": 1e-5,
}
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MIDDLE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
ONE_B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""A Llama with 1.5 billion parameters."""
LAYERS = _MIDDLE["num_hidden_layers"]
"""Layers of the mixture of experts."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}

EXACT = 1e-4
"""Nats; bound of the difference between two fp32 implementations of a small policy."""
ROUNDINGS = 3.0
"""Bound of the mean difference of two bfloat16 implementations relative to the bfloat16 error of transformers: two
independent errors make 2 ** 0.5, and one of the two may round more intermediate results to bfloat16."""


def write_dense(folder: Path, *, seed: int, dtype: str, toy: bool) -> Path:
    """A Llama with grouped queries and a tokenizer, in `dtype`."""
    return _write("llama", folder, seed, dtype, **(_SMALL if toy else _MIDDLE))


def write_experts(folder: Path, *, seed: int, dtype: str) -> Path:
    """A Qwen3-MoE with two of eight experts per token, in pairs with nearly equal router rows.

    Rounding selects one of a pair, so that engine and trainer often select different experts without replay.
    """
    return _write("qwen3_moe", folder, seed, dtype, **_MIDDLE, **EXPERTS, mlp_only_layers=[])


def write_config_only(folder: Path) -> Path:
    """Config and tokenizer of the 1B policy without weights, which vLLM generates (`load_format: dummy`)."""
    from transformers import LlamaConfig

    config = LlamaConfig(**_COMMON | ONE_B, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _write(kind: str, folder: Path, seed: int, dtype: str, **shape: Any) -> Path:
    make(kind, folder, dtype=getattr(torch, dtype), init=partial(_fill, seed=seed), **_COMMON, **_HEADS, **shape)
    save_tokenizer(folder)
    return folder


def _fill(model: Any, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            continue  # norms are 1
        std = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5 * (LOGIT_STD if "lm_head" in name else 1)
        parameter.normal_(0.0, std, generator=generator)
        if ".gate.weight" in name:  # a router: rows 2i and 2i + 1 differ by at most one unit of bfloat16
            parameter[1::2] = parameter[0::2] * (1 + 2.0**-8)


class Reference:
    """The policy in a folder by transformers on the CPU, in fp32 and in bfloat16 with fp32 logits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exact = _loaded(folder, torch.float32)
        self._rounded: Any = None

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """[T] log-probs (nats) of the completion's tokens in fp32."""
        return _logprobs(self._exact, self._exact.lm_head.weight, prompt, completion)

    def rounded(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """[T] the same with bfloat16 weights and activations and fp32 logits."""
        if self._rounded is None:
            self._rounded = _loaded(self._folder, torch.bfloat16)
        return _logprobs(self._rounded, self._rounded.lm_head.weight.float(), prompt, completion)


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    """Loads in `dtype`: rotary frequencies stay fp32, unlike in a model converted after it was built."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()


@torch.no_grad()
def _logprobs(model: Any, head: torch.Tensor, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    ids = torch.tensor([[*prompt, *completion]])
    hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
    rows = (hidden.float() @ head.T).log_softmax(-1)
    found: list[float] = rows.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    assert all(map(math.isfinite, found))
    return found


@dataclass(frozen=True, kw_only=True)
class LogprobGap:
    """|a - b| over tokens (nats)."""

    mean: float
    median: float
    largest: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bound of the difference between two implementations."""

    statistic: Literal["mean", "largest"]
    """Of a `LogprobGap`."""
    nats: float
    why: str

    def of(self, found: LogprobGap) -> float:
        """The statistic of `found` that is bounded (nats)."""
        return found.mean if self.statistic == "mean" else found.largest


def gap(a: Sequence[float], b: Sequence[float]) -> LogprobGap:
    """Difference of two lists of log-probs of the same tokens."""
    found = [abs(x - y) for x, y in zip(a, b, strict=True)]
    finite = all(map(math.isfinite, found)) and bool(found)
    return LogprobGap(
        mean=statistics.fmean(found) if finite else math.nan,
        median=statistics.median(found) if finite else math.nan,
        largest=max(found) if finite else math.nan,
        tokens=len(found),
    )


def sampled(rollout: Rollout, logprobs: Sequence[float]) -> list[float]:
    """The `logprobs` [T] of sampled tokens, without forced ones."""
    return [value for value, kept in zip(logprobs, rollout.loss_mask, strict=True) if kept]


def bound_for(
    dtype: str, reference: Reference, prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]
) -> Bound:
    """The bound for policies of `dtype`; for bfloat16 measured by transformers on these completions."""
    if dtype == "float32":
        return Bound(statistic="largest", nats=EXACT, why="two fp32 implementations of a small policy")
    exact: list[float] = []
    rounded: list[float] = []
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        exact += reference.logprobs(prompt, rollout.token_ids)
        rounded += reference.rounded(prompt, rollout.token_ids)
    mean = gap(exact, rounded).mean
    return Bound(
        statistic="mean",
        nats=ROUNDINGS * mean,
        why=f"{ROUNDINGS:g} x {mean:.2g}, the bfloat16 error of transformers on the CPU",
    )


def record_gap(
    record: Recorder, check: str, found: LogprobGap, bound: Bound, detail: str, dtype: str, **data: object
) -> None:
    """Record a check that passes within the bound, with every token within the probe's tolerance."""
    text = f"{detail}: median {found.median:.2g}, mean {found.mean:.2g}, largest {found.largest:.2g} nats"
    both = finite({"gap": asdict(found), "bound": asdict(bound), **data})
    if found.largest > TOLERANCE[dtype]:
        record.holds(check, False, f"{text}; expected at most {TOLERANCE[dtype]} for every token", data=both)
    else:
        record.measured(
            check, bound.of(found), "nats", at_most=bound.nats, detail=f"{text}; bound: {bound.why}", data=both
        )

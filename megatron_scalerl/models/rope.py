"""Rotary frequencies from a Hugging Face config of transformers 4 or 5, with the scaling applied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_scalerl.record import record

if TYPE_CHECKING:
    import torch

KINDS = ("default", "linear", "llama3", "yarn")


@record
class Rotary:
    """The rotary position embedding of a policy."""

    inv_freq: torch.Tensor
    """[d/2] fp32 frequencies, with the scaling applied."""
    factor: float = 1.0
    """YaRN's factor on the rotated queries and on the rotated keys, which Hugging Face applies to cosine and sine."""

    def softmax_scale(self, head_dim: int) -> float | None:
        """The softmax scale of attention with `factor` applied to queries and keys; None for the default 1 /
        sqrt(d)."""
        if self.factor == 1.0:
            return None
        return self.factor**2 / math.sqrt(head_dim)


def rotary(config: Any, head_dim: int, *, partial: bool = False) -> Rotary:
    """Read the rotary embedding from rope_parameters (transformers 5) or rope_theta and rope_scaling (transformers
    4).

    Types are `default`, `linear`, `llama3` (Llama 3.1's scaling) and `yarn` (arXiv 2309.00071). partial: whether RoPE
    may rotate only a part of each head; the frequencies are then for the rotated part. Raises ValueError for a type
    that is not listed here, for a scaling that lacks a key, and for a partly rotated head without `partial` or with
    YaRN.
    """
    import torch

    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    for key in ("rope_dim", "use_fope"):
        if parameters.get(key):
            raise ValueError(f"config.json: {key}: engines apply this key, but the trainer does not; remove the key")
    # In configs of transformers 4, rope_theta is outside rope_scaling.
    theta = float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default")) or "default"
    if kind not in KINDS:
        raise ValueError(f"config.json: rope_type: expected one of {', '.join(KINDS)}, found {kind!r}")
    share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    # The trainer applies YaRN's factor to the attention scores, so an unrotated part of a head would be scaled, too.
    if share != 1.0 and (not partial or kind == "yarn"):
        raise ValueError(
            f"config.json: partial_rotary_factor: {share} is not supported for {config.model_type} with {kind} "
            "positions, only 1"
        )
    head_dim = int(head_dim * share)
    # The operations are transformers', in fp32 and in the same order: a different rounding would change the angles of
    # late positions.
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    parameters.setdefault(
        "original_max_position_embeddings",
        getattr(config, "original_max_position_embeddings", None) or getattr(config, "max_position_embeddings", None),
    )
    if kind == "linear":
        return Rotary(inv_freq=frequencies / _need(parameters, "factor"))
    if kind == "llama3":
        return Rotary(inv_freq=_llama3(frequencies, parameters))
    if kind == "yarn":
        context = getattr(config, "max_position_embeddings", None)
        return _yarn(parameters, theta=theta, head_dim=head_dim, context=context)
    return Rotary(inv_freq=frequencies)


def _need(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if value is None:
        raise ValueError(f"config.json: rope_scaling lacks {key}; the keys are {', '.join(sorted(parameters))}")
    return float(value)


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's interpolation of the frequencies.

    Low frequencies are divided by `factor`, high frequencies are kept, and frequencies in between are interpolated.
    Llama 4 Scout has no frequencies in between, because both bounds are 1.
    """
    import torch

    factor, low, high = (_need(parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _need(parameters, "original_max_position_embeddings")
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    if high == low:
        return scaled
    smooth = (original / wavelength - low) / (high - low)
    ramp = (1 - smooth) * frequencies / factor + smooth * frequencies
    middle = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(middle, ramp, scaled)


def _yarn(parameters: Mapping[str, Any], *, theta: float, head_dim: int, context: int | None) -> Rotary:
    """YaRN's interpolation of the frequencies.

    Low frequencies are divided by the factor, high frequencies are kept, and frequencies in between are interpolated
    linearly over the dimensions.
    """
    import torch

    original = _need(parameters, "original_max_position_embeddings")
    factor = parameters.get("factor")
    if factor is None:
        factor = (context or original) / original
    factor = float(factor)
    # transformers has the defaults 32 and 1, and also replaces 0 and null with the defaults.
    low = _dimension_of(float(parameters.get("beta_fast") or 32), theta, head_dim, original)
    high = _dimension_of(float(parameters.get("beta_slow") or 1), theta, head_dim, original)
    if parameters.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        # As in transformers, high differs from low, because the next lines divide by the difference.
        high += 0.001
    powers = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    mixed = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return Rotary(inv_freq=mixed, factor=_yarn_factor(parameters, factor))


def _dimension_of(rotations: float, theta: float, head_dim: int, original: float) -> float:
    """The dimension (a fraction) whose frequency makes `rotations` full rotations over the original context
    length."""
    return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    top = parameters.get("mscale")
    bottom = parameters.get("mscale_all_dim")
    # With mscale equal to mscale_all_dim, as in DeepSeek's configs, the factor is 1.
    if top and bottom:
        return _mscale(factor, top) / _mscale(factor, bottom)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    if factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0

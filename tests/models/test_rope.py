"""Rotary frequencies equal transformers', with every scaling and in both dialects of the config."""

import math

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_scalerl.models import family
from megatron_scalerl.models.rope import rotary

LLAMA31 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
SCOUT = {**LLAMA31, "factor": 16.0, "high_freq_factor": 1.0}
"""Llama 4 Scout's: no ramp between long and short wavelengths."""
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)
"""What Qwen3's model card gives for long contexts."""
SCALINGS = {
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=2.0),
    "llama3": LLAMA31,
    "llama3 without a ramp": SCOUT,
    "yarn": YARN,
    "yarn, bounds": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 1.5},
    "yarn, mscale": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn, a short context": {**YARN, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_equal_transformers(name):
    scaling = SCALINGS[name]
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=dict(scaling))
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    found = rotary(config, 128)
    assert torch.allclose(found.inv_freq, expected, rtol=1e-6, atol=0)
    assert found.factor == pytest.approx(factor, rel=1e-12)
    plain = rotary(LlamaConfig(rope_parameters=dict(rope_type="default", rope_theta=scaling["rope_theta"])), 128)
    assert not torch.allclose(found.inv_freq, plain.inv_freq, rtol=1e-3)


def test_yarn_by_hand():
    """Factor 4: high frequencies kept, low ones a quarter; attention factor 0.1 ln 4 + 1, squared on the scores."""
    config = LlamaConfig(head_dim=128, rope_parameters=dict(YARN), max_position_embeddings=131072)
    found = rotary(config, 128)
    plain = rotary(LlamaConfig(rope_parameters=dict(rope_type="default", rope_theta=1e6)), 128).inv_freq
    ratio = plain / found.inv_freq
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(4.0) and 1.0 < ratio[34] < 4.0
    assert found.factor == pytest.approx(1.1386294361)
    assert found.softmax_scale(64) == pytest.approx(1.1386294361**2 / 8)
    assert rotary(LlamaConfig(), 128).softmax_scale(128) is None
    assert family(config).transformer["softmax_scale"] == pytest.approx(1.1386294361**2 / math.sqrt(128))


def test_both_dialects_are_read():
    """transformers 4 says rope_theta and rope_scaling, 5 rope_parameters: theta 100 in dimension 4 is (1, 0.1)."""
    old, new = PretrainedConfig(), PretrainedConfig()
    old.rope_theta, new.rope_parameters = 100.0, dict(rope_type="default", rope_theta=100.0)
    for config in (old, new):
        assert rotary(config, 4).inv_freq.tolist() == pytest.approx([1.0, 0.1])
    scaled = PretrainedConfig()
    scaled.rope_theta, scaled.max_position_embeddings = 1e6, 131072
    scaled.rope_scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    expected = rotary(LlamaConfig(rope_parameters=dict(YARN), max_position_embeddings=131072), 128)
    assert torch.equal(rotary(scaled, 128).inv_freq, expected.inv_freq)
    assert rotary(scaled, 128).factor == expected.factor


@pytest.mark.parametrize(
    "parameters, line",
    [
        (dict(rope_type="longrope"), "rope_type: expected one of default, linear, llama3, yarn, found 'longrope'"),
        (dict(rope_type="linear"), "rope_scaling lacks factor; the keys are "),
        (dict(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor: 0.5 is not supported"),
    ],
)
def test_other_scalings_are_refused(parameters, line):
    config = PretrainedConfig()
    config.rope_parameters = {"rope_theta": 1e4, **parameters}
    with pytest.raises(ValueError, match=line):
        rotary(config, 4)

"""An engine's answer as a rollout: the experts it chose."""

import base64
import io

import msgspec
import numpy as np
import pytest

from megatron_scalerl.rollouts.engine_client import EngineError, SamplingSpec, _Choice, _rollout


def choice(array):
    """One completion of two tokens as vLLM writes it, with this array in .npy form."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        encoded = base64.b64encode(buffer.getvalue()).decode()
    answer = {
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "routed_experts": encoded,
    }
    return msgspec.convert(answer, _Choice)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_expert_choices_come_over_in_their_own_width(dtype):
    experts = np.arange(24, dtype=dtype).reshape(4, 3, 2)
    found = _rollout(choice(experts), SamplingSpec(max_tokens=2)).expert_choices
    assert (found.layers, found.topk, found.width) == (3, 2, np.dtype(dtype).itemsize)
    assert np.frombuffer(found.data, f"<u{found.width}").reshape(4, 3, 2).tolist() == experts.tolist()


@pytest.mark.parametrize("array", [np.zeros((4, 3), np.uint8), np.zeros((4, 3, 2), np.float32)])
def test_another_array_is_refused(array):
    with pytest.raises(EngineError, match="routed_experts: expected uint8 or uint16"):
        _rollout(choice(array), SamplingSpec(max_tokens=2))

"""Casts and the search for NaN and Inf, against torch; transposed copies."""

import numpy as np
import pytest
import torch

from megatron_scalerl.checkpoints.assembly import BITS, TORCH_NAMES, cast, copy_into, has_nonfinite

SPECIAL = (0.0, -0.0, 1.0, -1.5, 3.4e38, -3.4e38, 1e-45, 6e-8, 65504.0, 65520.0, float("inf"), -float("inf"))


def bits(tensor, dtype):
    view = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.view(view).numpy().view(BITS[dtype])


@pytest.mark.parametrize("source", TORCH_NAMES)
@pytest.mark.parametrize("target", TORCH_NAMES)
def test_casts_are_those_of_torch(source, target):
    torch.manual_seed(0)
    values = torch.cat([torch.tensor(SPECIAL), torch.randn(4096) * 10.0 ** torch.randint(-40, 38, (4096,))])
    # halfway between two bfloat16 values, both ways: ties go to the even one
    values = torch.cat([values, torch.tensor([1.00390625, 1.01171875])]).to(getattr(torch, TORCH_NAMES[source]))
    expected = values.to(getattr(torch, TORCH_NAMES[target]))
    assert np.array_equal(cast(bits(values, source), source, target), bits(expected, target))


def test_nan_stays_nan_in_bfloat16():
    quiet_and_loud = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    assert [hex(v & 0x7FFF) for v in cast(quiet_and_loud, "F32", "BF16")] == ["0x7fc0"] * 3


@pytest.mark.parametrize("dtype", TORCH_NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_nonfinite_value_is_found_at_any_position(dtype, bad):
    kind = getattr(torch, TORCH_NAMES[dtype])
    values = torch.full((300_001,), torch.finfo(kind).max, dtype=kind)
    values[::2] = torch.finfo(kind).min
    assert not has_nonfinite(bits(values, dtype), dtype)
    for place in (0, 150_000, 262_144, 300_000):
        changed = values.clone()
        changed[place] = bad
        assert has_nonfinite(bits(changed, dtype), dtype), place


def test_a_transposed_copy_over_several_tiles_is_complete():
    source = np.arange(1100 * 300, dtype=np.uint32).reshape(1100, 300)
    target = np.zeros((300, 1100), np.uint32)
    copy_into(target, source.T)
    assert np.array_equal(target, source.T)

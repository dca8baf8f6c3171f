"""Attention without a fused kernel is refused before a run, or an error in its first step; latent attention has one.

Not exercised: a GPU. What Transformer Engine does was read in its source, version 2.20.2.
"""

import re
from types import SimpleNamespace

import pytest
import random_policies
import torch
from device_reads import DeviceReads
from megatron.core.transformer.enums import AttnBackend
from random_policy import make_recipe

from megatron_scalerl.distributed.fused_attention import why_unfused
from megatron_scalerl.distributed.parallel import unwrap
from megatron_scalerl.trainer import model
from megatron_scalerl.trainer.layers import latent
from megatron_scalerl.trainer.layers.packing import packed_row

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 3)


@pytest.mark.parametrize(
    "capability, deterministic, heads, longest, said",
    [
        (ADA, False, 12, 512, "packed rows below capability 9.0"),
        (HOPPER, False, 32, 14_336, ""),
        (HOPPER, True, 32, 14_336, "trainer.deterministic: .* 14,336 tokens on Hopper"),
        (HOPPER, True, 32, 5_760, ""),
        (HOPPER, True, 32, 5_824, "MSRL_LAYERS=plain"),
        (BLACKWELL, True, 32, 14_336, ""),
    ],
)
def test_the_reason_names_the_way_out(capability, deterministic, heads, longest, said):
    reason = why_unfused(capability, deterministic=deterministic, heads=heads, longest=longest)
    assert re.search(said, reason) and bool(reason) == bool(said)


def test_a_rank_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(model, "capability", lambda: ADA)
    config = SimpleNamespace(num_attention_heads=12, tensor_model_parallel_size=1)
    with pytest.raises(ValueError, match=r"below capability 9\.0; set MSRL_LAYERS=plain"):
        model._check_attention(config, make_recipe("none"))


@pytest.mark.parametrize("given, found", [(None, "0"), ("1", "1")])
def test_unfused_attention_is_off_unless_the_user_has_set_it(given, found, monkeypatch):
    """Megatron would set 1."""
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)
    if given:
        monkeypatch.setenv("NVTE_UNFUSED_ATTN", given)
    config = SimpleNamespace(attention_backend=AttnBackend.auto)
    model.PolicyModel._set_attention_backend(SimpleNamespace(config=config))
    assert model.os.environ["NVTE_UNFUSED_ATTN"] == found


@pytest.fixture
def attention(new_trainer, tmp_path):
    """The first layer's latent attention, its input, and a row of two sequences for each kind of layers."""
    from megatron_scalerl.trainer.step import make_trainer

    random_policies.make("kimi", tmp_path)
    policy = unwrap(make_trainer(make_recipe(tmp_path), new_trainer().parallel).chunks[0])
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    rows = [packed_row([0, 5, 12], positions, fused=fused) for fused in (False, True)]
    for row in rows:
        row.angles = policy._rotary_angles(row)
    return policy.decoder.layers[0].self_attention, torch.randn(12, 1, 64), rows


def test_latent_attention_rotates_as_plain_layers_do_without_a_read_of_the_device(attention):
    layer, states, rows = attention
    plain, fused = [], []
    with DeviceReads().counting() as found:
        for row, tensors in zip(rows, (plain, fused)):
            tensors += layer.get_query_key_value_tensors(states, None, None, row)
    assert rows[1].qkv_format == "thd" and not found
    assert all(map(torch.equal, plain, fused))


@pytest.mark.parametrize("capability, width", [(HOPPER, 24), (BLACKWELL, 12)])
def test_values_of_latent_attention_are_padded_below_blackwell_alone(capability, width, attention, monkeypatch):
    layer, states, (_, row) = attention
    monkeypatch.setattr(latent, "capability", lambda: capability)
    query, key, value, *_ = layer.get_query_key_value_tensors(states, None, None, row)
    widths = []
    monkeypatch.setattr(layer.core_attention, "forward", lambda q, k, v, mask, **_: widths.append(v.shape[-1]) or v)
    result = layer._run_core_attention(query, key, value, None, packed_seq_params=row)
    assert widths == [width] and torch.equal(result, value)

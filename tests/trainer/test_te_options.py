"""What Transformer Engine's layers are told, as far as a CPU shows it: none runs here."""

import pytest
import torch
from megatron.core.extensions import transformer_engine as te_extensions
from megatron.core.models.common.embeddings import rope_utils

from megatron_scalerl.distributed import device
from megatron_scalerl.trainer import model, options


class LinearOfTE(torch.nn.Linear):
    """Has the attribute of Transformer Engine's linear layers."""

    fuse_wgrad_accumulation = False


def test_only_linears_of_te_accumulate_into_main_grad():
    layers = [LinearOfTE(2, 2), torch.nn.Linear(2, 2), torch.nn.Sequential(LinearOfTE(2, 2))]
    model.accumulate_in_linears([torch.nn.Sequential(*layers)])
    assert layers[0].fuse_wgrad_accumulation and layers[2][0].fuse_wgrad_accumulation
    assert not hasattr(layers[1], "fuse_wgrad_accumulation") and not LinearOfTE.fuse_wgrad_accumulation


@pytest.mark.parametrize("passes_on", [False, True])
def test_fused_rope_of_packed_rows_rotates_interleaved_pairs(monkeypatch, passes_on):
    """Where Megatron-Core's own wrapper passes `interleaved` on, that stays."""

    def of_the_floor(t, cu_seqlens, freqs, cp_size=1, cp_rank=0): ...
    def newer(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False): ...

    wrapper = newer if passes_on else of_the_floor
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", wrapper)
    called = []
    rotate = lambda *args, **keywords: called.append((args, keywords))  # noqa: E731
    monkeypatch.setattr(te_extensions, "apply_rotary_pos_emb", rotate, raising=False)
    model._fused_rope_as(True)
    if passes_on:
        assert rope_utils.fused_apply_rotary_pos_emb_thd is wrapper
        return
    rope_utils.fused_apply_rotary_pos_emb_thd(
        "t", "starts", "angles", cp_size=2, cp_rank=1
    )  # as apply_rotary_pos_emb
    how = dict(tensor_format="thd", interleaved=True, fused=True, cu_seqlens="starts", cp_size=2, cp_rank=1)
    assert called == [(("t", "angles"), how)]


def test_without_te_nothing_is_fused():
    assert not device.HAVE_TE and not options._device_settings()["apply_rope_fusion"]

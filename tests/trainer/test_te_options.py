"""What Transformer Engine's layers are told, as far as a CPU shows it: none runs here."""

import torch

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


def test_without_te_nothing_is_fused():
    assert not device.HAVE_TE and not options._device_settings()["apply_rope_fusion"]

"""Memory for blocks of logits where the recipe states none."""

from types import SimpleNamespace

import pytest
import torch

from megatron_scalerl.trainer import model


@pytest.mark.parametrize(("free_gib", "mib"), [(0, 512), (31.9, 512), (32, 2048), (139, 2048)])
def test_it_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, free_gib: float, mib: float) -> None:
    """0 is free on a CPU. On one rank no other is asked."""
    monkeypatch.setattr(model, "free_memory", lambda: int(free_gib * 2**30))
    assert model._logit_workspace(SimpleNamespace(device=torch.device("cpu"), tp_size=1)) == mib

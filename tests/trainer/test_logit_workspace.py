"""Memory for blocks of logits where the recipe states none."""

from types import SimpleNamespace

import pytest
import torch

from megatron_scalerl.trainer import model


@pytest.mark.parametrize(("free_gib", "mib"), [(0, 512), (31.9, 512), (32, 2048), (139, 2048)])
def test_it_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, free_gib: float, mib: float) -> None:
    """0 is free on a CPU. On one rank no other is asked."""
    monkeypatch.setattr(model, "free_memory", lambda: int(free_gib * 2**30))
    assert model._logit_workspace(SimpleNamespace(tp_size=1)) == mib


def test_ranks_of_a_tensor_parallel_group_take_that_of_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exchange statistics after each chunk: chunks must be equal."""

    def fullest(free: torch.Tensor, **how: object) -> None:
        assert how == {"op": torch.distributed.ReduceOp.MIN, "group": "tp"}
        free.fill_(10 * 2**30)

    monkeypatch.setattr(model, "HAVE_GPU", True)
    monkeypatch.setattr(model, "free_memory", lambda: 70 * 2**30)
    monkeypatch.setattr(model.dist, "all_reduce", fullest)
    parallel = SimpleNamespace(tp_size=2, device=torch.device("cpu"), groups=SimpleNamespace(tp="tp"))
    assert model._logit_workspace(parallel) == 512

"""A tree of host tensors comes over, each tensor once."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from megatron_scalerl.trainer import staging
from megatron_scalerl.trainer.layers.packing import packed_row
from megatron_scalerl.trainer.staging import staged

META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Leaf:
    ids: torch.Tensor
    name: str = "leaf"


@dataclass(frozen=True, kw_only=True)
class Tree:
    values: torch.Tensor
    again: torch.Tensor
    mask: torch.Tensor
    nothing: None
    empty: torch.Tensor
    leaves: tuple[Leaf, ...]
    number: int = 7


def tree():
    values = torch.from_numpy(np.linspace(-1, 1, 12, dtype=np.float32)).view(3, 4)
    leaf = Leaf(ids=torch.arange(5, dtype=torch.int32)[::2])
    return Tree(
        values=values,
        again=values,
        mask=torch.tensor([True, False, True]),
        nothing=None,
        empty=torch.empty(0, 2, dtype=torch.int64),
        leaves=(leaf, leaf, Leaf(ids=torch.tensor(3))),
    )


@pytest.fixture
def pinned(monkeypatch):
    """The tensors that were sent, each in place of its copy in pinned memory, which a CPU does not have."""
    sent = []
    monkeypatch.setattr(staging, "_pinned", lambda tensor: sent.append(tensor) or tensor)
    return sent


def test_every_tensor_is_sent_once_with_type_and_shape(pinned):
    given = tree()
    assert staged(given, CPU) is given
    found = staged(given, META)
    assert [id(tensor) for tensor in pinned] == [
        id(tensor) for tensor in (given.values, given.mask, given.empty, given.leaves[0].ids, given.leaves[2].ids)
    ]
    pairs = [(given.values, found.values), (given.mask, found.mask), (given.empty, found.empty)]
    pairs += [(a.ids, b.ids) for a, b in zip(given.leaves, found.leaves)]
    for before, after in pairs:
        assert (after.dtype, after.shape, after.device) == (before.dtype, before.shape, META)
    assert found.again is found.values and found.leaves[0] is found.leaves[1]
    assert (found.number, found.nothing, found.leaves[0].name) == (7, None, "leaf")


@pytest.mark.usefixtures("pinned")
def test_a_packed_row_keeps_what_megatron_reads():
    positions = torch.cat([torch.arange(n) for n in (5, 30, 8)])
    fused = staged(packed_row([0, 5, 35, 43], positions, chunk=16, fused=True), META)
    assert (fused.qkv_format, fused.max_seqlen_q, fused.longest, fused.cu_seqlens_q.device) == ("thd", 64, 30, META)
    assert fused.cu_seqlens_q is fused.cu_seqlens_kv and fused.in_chunks.cu_seqlens_q.device == META
    plain = staged(packed_row([0, 5, 35, 43], positions, chunk=64), META)
    assert plain.chunked is plain.layout and plain.layout.buckets[0].gather.device == META


def test_a_tensor_of_a_device_is_a_mistake():
    with pytest.raises(AssertionError, match="meta"):
        staged(replace(tree(), values=torch.empty(3, device=META)), META)

"""A tree of host tensors comes over in one copy, each tensor once, with type, shape and bits."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from megatron_scalerl.trainer.layers.packing import packed_row
from megatron_scalerl.trainer.staging import ALIGNMENT, staged

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
def one_copy(monkeypatch):
    """Stands in for pinned memory and a GPU's memory; gives the buffers of every copy."""
    buffers = []
    empty = torch.empty

    def pinned(size):
        buffers.append(empty(size, dtype=torch.uint8))
        return buffers[-1]

    def of_device(*shape, device=None, **keywords):
        return empty(*shape, **keywords)

    monkeypatch.setattr("megatron_scalerl.trainer.staging._pinned", pinned)
    monkeypatch.setattr(torch, "empty", of_device)
    return buffers


def test_on_a_cpu_it_is_the_tree_itself():
    given = tree()
    assert staged(given, CPU) is given


def test_every_tensor_arrives_once_with_its_bits_and_keeps_them(one_copy):
    given = tree()
    found = staged(given, META)
    [buffer] = one_copy
    assert buffer.numel() == 4 * ALIGNMENT  # values, mask, ids, a number; the empty tensor takes no place
    assert found.again is found.values and found.leaves[0] is found.leaves[1]
    pairs = [(given.values, found.values), (given.mask, found.mask), (given.empty, found.empty)]
    pairs += [(a.ids, b.ids) for a, b in zip(given.leaves, found.leaves)]
    for before, after in pairs:
        assert (after.dtype, after.shape) == (before.dtype, before.shape) and torch.equal(before, after)
        assert after.storage_offset() * after.itemsize % ALIGNMENT == 0
    assert (found.number, found.nothing, found.leaves[0].name) == (7, None, "leaf")
    before = found.values.clone()
    given.values.zero_()
    assert torch.equal(found.values, before)


def test_a_packed_row_keeps_what_megatron_reads(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.trainer.staging._pinned", partial(torch.empty, dtype=torch.uint8))
    positions = torch.cat([torch.arange(n) for n in (5, 30, 8)])
    fused = staged(packed_row([0, 5, 35, 43], positions, chunk=16, fused=True), META)
    assert (fused.qkv_format, fused.max_seqlen_q, fused.longest, fused.cu_seqlens_q.device) == ("thd", 64, 30, META)
    assert fused.cu_seqlens_q is fused.cu_seqlens_kv and fused.in_chunks.cu_seqlens_q.device == META
    plain = staged(packed_row([0, 5, 35, 43], positions, chunk=64), META)
    assert plain.chunked is plain.layout and plain.layout.buckets[0].gather.device == META


def test_a_tensor_of_a_device_is_a_mistake():
    with pytest.raises(AssertionError, match="meta"):
        staged(replace(tree(), values=torch.empty(3, device=META)), META)

"""The digest of values: the formula, any layout, any cut into parts, and what it must notice."""

import random

import numpy as np
import pytest
import torch
from sampling import sampled

from megatron_scalerl.weights.digest import at, mixed, total, value_digest

MASK = (1 << 64) - 1


def by_formula(values, tensor):
    """Element by element, as the module's docstring says."""
    bits = values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])
    found = 0
    for index in np.ndindex(*values.shape):
        term = int(bits[index]) & ((1 << (8 * values.element_size())) - 1)
        for axis, i in enumerate(index):
            term *= mixed(((axis + 1) << 40) + i) | 1
        found += term
    return found * (mixed(tensor) | 1) & MASK


def of(values, tensor=3, ranges=None):
    ranges = ranges or [(0, size) for size in values.shape]
    return value_digest(values, tensor, range(values.dim()), [range(a, b) for a, b in ranges])


def random_values(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a kernel has several programs for a row."""
    monkeypatch.setattr("megatron_scalerl.weights.sum_kernel.BLOCK", 4)
    monkeypatch.setattr("megatron_scalerl.weights.sum_kernel.SPAN", 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 9), (1, 6), (6, 1), (3, 4, 5), (2, 1, 3, 4)])
def test_the_formula(way, shape, dtype):
    values = random_values(shape, dtype)
    assert of(values) == by_formula(values, 3) != of(values, tensor=4)


@pytest.mark.parametrize("seed", sampled("cuts", range(10), 2))
def test_parts_add_up_in_any_order_and_layout(way, seed):
    rng, values = random.Random(seed), random_values((6, 7, 8), torch.bfloat16, seed)
    cuts = [sorted({0, size, rng.randrange(size), rng.randrange(size)}) for size in values.shape]
    parts = []
    for i in zip(cuts[0], cuts[0][1:]):
        for j in zip(cuts[1], cuts[1][1:]):
            for k in zip(cuts[2], cuts[2][1:]):
                part = values[slice(*i), slice(*j), slice(*k)]
                order = rng.sample(range(3), 3)
                # held transposed, with gaps between its rows, and with one dimension in another order
                held = torch.zeros([part.shape[d] + 2 for d in order], dtype=part.dtype)
                held = held[tuple(slice(0, part.shape[d]) for d in order)]
                along = [range(*(i, j, k)[d]) for d in order]
                mixed_up = rng.randrange(3)
                shuffled = torch.tensor(rng.sample(list(along[mixed_up]), len(along[mixed_up])))
                held.copy_(part.permute(order).index_select(mixed_up, shuffled - along[mixed_up].start))
                along[mixed_up] = shuffled
                parts.append(value_digest(held, 3, order, along))
    rng.shuffle(parts)
    assert total(parts) == of(values)


def test_a_part_without_one_of_the_dimensions():
    values = random_values((4, 5, 6))
    of_experts = [value_digest(values[e], 3, (1, 2), (range(5), range(6))) * at(0, e) for e in range(4)]
    assert total(of_experts) == of(values)

"""The digest against plain integer arithmetic, and the changes that it must detect."""

import pytest
import torch

from megatron_scalerl.weights.digest import combine, digest

pytestmark = pytest.mark.usefixtures("way")
MASK = (1 << 64) - 1


def mixed(x):
    """splitmix64 as published."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def by_hand(words):
    chunk = 1 << 20
    return sum(w * (mixed(i % chunk) | 1) * (mixed(i // chunk) | 1) for i, w in enumerate(words)) & MASK


def packed(words):
    return torch.tensor([w - (1 << 64) if w >> 63 else w for w in words], dtype=torch.int64).view(torch.uint8)


def test_equals_plain_integers():
    assert mixed(0) == 0xE220A8397B1DCDAF  # first output of splitmix64 with seed 0
    words = [mixed(i + 1000) for i in range(5000)]
    assert digest(packed(words)) == by_hand(words)
    assert digest(packed([])) == 0


def test_later_chunks_depend_on_their_position():
    data = torch.zeros((1 << 20) + 3, dtype=torch.int64)
    data[-1] = 77
    assert digest(data.view(torch.uint8)) == 77 * (mixed(2) | 1) * (mixed(1) | 1) & MASK


def test_an_update_s_digest_depends_on_order_and_number_of_buckets():
    assert len({combine(d) for d in ([1, 2], [2, 1], [1], [1, 2, 0], [0], [])}) == 6
    assert combine([1, 2]) == f"{mixed(mixed(1) ^ 2):016x}"

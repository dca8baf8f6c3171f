"""Changed elements: what is found, coded and read again is exact to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_scalerl.weights import changes as module
from megatron_scalerl.weights.changes import bits_of, decode, encode, find

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_bits(n, dtype, seed):
    """Any bits: NaNs with payloads, infinities, subnormals, zeros of both signs."""
    g = torch.Generator().manual_seed(seed)
    low, high = (-(1 << 15), 1 << 15) if dtype.itemsize == 2 else (-(1 << 31), 1 << 31)
    kind = torch.int16 if dtype.itemsize == 2 else torch.int32
    return torch.randint(low, high, (n,), generator=g).to(kind).view(dtype)


def changed(values, places, seed, *, near):
    """A copy with other bits at these places; near: a few units in the last place away."""
    found = bits_of(values).clone()
    g = torch.Generator().manual_seed(seed)
    if near:
        found[places] += torch.randint(1, 4, (len(places),), generator=g).to(found.dtype)
    else:
        found[places] = bits_of(random_bits(len(places), values.dtype, seed + 1))
    return found.view(values.dtype)


def sent(old, new, ranges):
    """What arrives of the change from old to new, and the size of its frame."""
    held = bits_of(old).clone()
    found = find(held, new)
    assert torch.equal(held, bits_of(new))
    if not found.positions.numel():
        return None, 0
    frame = encode([(0, found)])
    [piece] = decode(frame, [(7, ranges, old.dtype)])
    return piece, frame.numel()


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=60, deadline=None)
@given(n=st.integers(8, 4000), share=st.floats(0, 0.12), near=st.booleans(), seed=st.integers(0, 2**16))
def test_what_arrives_makes_the_new_bits(dtype, n, share, near, seed):
    old = random_bits(n, dtype, seed)
    places = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: int(n * share)].sort().values
    new = changed(old, places, seed, near=near)
    piece, _ = sent(old, new, ((0, n),))
    result = bits_of(old).clone()
    if piece is not None:
        result[piece.positions] = bits_of(piece.values)
    assert torch.equal(result, bits_of(new))


def test_all_are_sent_where_many_changed():
    assert module.most_coded(8 * module.SMALL + 8) == module.SMALL + 1
    assert module.most_coded(module.SMALL) == module.SMALL and module.most_coded(3) == 3


def test_a_view_that_is_not_contiguous_and_a_scalar():
    old = torch.randn(40, 30)
    new = old.clone()
    new[3, 4] += 1
    found = find(bits_of(old.t().contiguous().view(-1)), new.t())
    assert found.positions.tolist() == [4 * 40 + 3]
    assert find(bits_of(torch.tensor([1.0])), torch.tensor(2.5)).positions.tolist() == [0]


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 70_000])
def test_gaps_of_any_length(gap):
    positions = torch.tensor([gap, 2 * gap + 1, 2 * gap + 2])
    gaps, sizes = module._gaps([positions, positions + 300])
    found = module._positions(gaps, sizes, [3, 3])
    assert torch.equal(found[0], positions) and torch.equal(found[1], positions + 300)


def test_bytes_of_a_changed_element():
    """At a density of 1 %, as weights in bf16 change: nearly all by one unit in the last place."""
    g = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 20, generator=g).bfloat16()
    places = (torch.rand(old.shape, generator=g) < 0.01).nonzero().flatten()
    new = changed(old, places, 0, near=True)
    _, nbytes = sent(old, new, ((0, len(old)),))
    assert nbytes / len(places) <= 3.1, nbytes / len(places)


def test_pieces_of_several_types_arrive_as_they_were():
    wide, narrow = random_bits(900, torch.float32, 0), random_bits(700, torch.bfloat16, 1)
    news = [changed(old, torch.arange(5, len(old), 9), 2, near=True) for old in (narrow, wide)]
    found = [find(bits_of(old).clone(), new) for old, new in zip((narrow, wide), news)]
    pieces = [(7, ((0, 700),), torch.bfloat16), (8, ((10, 100),), torch.float32), (9, ((0, 900),), torch.float32)]
    arrived = decode(encode([(0, found[0]), (2, found[1])]), pieces)
    assert [(each.tensor, each.ranges, each.values.dtype) for each in arrived] == [pieces[2], pieces[0]]
    for each, piece in zip(arrived, reversed(found)):
        assert torch.equal(each.positions, piece.positions) and torch.equal(bits_of(each.values), piece.bits)

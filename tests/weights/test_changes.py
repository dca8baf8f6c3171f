"""Changed elements: what is found, coded and read again is exact to the bit, in every way to compute it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_scalerl.weights import changes as module
from megatron_scalerl.weights.changes import Changes, bits_of, decode, encode, find
from megatron_scalerl.weights.digest import value_digest

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


def sent(old, new, codec, ranges):
    """What arrives of the change from old to new, and the size of its frame."""
    held = bits_of(old).clone()
    found = find(held, new)
    assert found is not None and torch.equal(held, bits_of(new))
    if not found.positions.numel():
        return None, 0
    frame = encode([(0, found)], codec)
    [piece] = decode(frame, [(7, ranges, old.dtype)])
    return piece, frame.numel()


@pytest.mark.parametrize("codec", ["absolute", "ulp"])
@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=60, deadline=None)
@given(n=st.integers(8, 4000), share=st.floats(0, 0.12), near=st.booleans(), seed=st.integers(0, 2**16))
def test_what_arrives_makes_the_new_bits(dtype, codec, n, share, near, seed):
    old = random_bits(n, dtype, seed)
    places = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: int(n * share)].sort().values
    new = changed(old, places, seed, near=near)
    piece, _ = sent(old, new, codec, ((0, n),))
    result = bits_of(old).clone()
    if piece is not None:
        result[piece.positions] = piece.bits(result[piece.positions])
    assert torch.equal(result, bits_of(new))


def test_both_ways_find_the_same():
    old = random_bits(10_000, torch.bfloat16, 0)
    new = changed(old, torch.arange(3, 10_000, 9), 1, near=False)
    held = bits_of(old).clone()
    found = find(held, new.view(100, 100))
    differ = (bits_of(old) != bits_of(new)).nonzero().flatten()
    assert torch.equal(found.positions, differ) and torch.equal(held, bits_of(new))
    assert torch.equal(found.old, bits_of(old)[differ]) and torch.equal(found.new, bits_of(new)[differ])


def test_all_are_sent_where_many_changed():
    old = torch.zeros(8 * module.SMALL + 8, dtype=torch.bfloat16)
    new = old.clone()
    new[: module.SMALL + 1] = 1
    assert find(bits_of(old.clone()), new).positions.tolist() == list(range(module.SMALL + 1))
    new[-1] = 1
    assert find(bits_of(old.clone()), new) is None
    small = torch.zeros(module.SMALL)
    assert find(bits_of(small.clone()), small + 1).positions.tolist() == list(range(module.SMALL))


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
    found = module._positions(gaps, sizes, [3, 3], [2 * gap + 3, 2 * gap + 303])
    assert torch.equal(found[0], positions) and torch.equal(found[1], positions + 300)


def test_bytes_of_a_changed_element():
    """At a density of 1 %, as weights in bf16 change: nearly all by one unit in the last place."""
    g = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 20, generator=g).bfloat16()
    places = (torch.rand(old.shape, generator=g) < 0.01).nonzero().flatten()
    new = changed(old, places, 0, near=True)
    for codec, most in (("absolute", 3.5), ("ulp", 3.0)):
        _, nbytes = sent(old, new, codec, ((0, len(old)),))
        assert nbytes / len(places) <= most, (codec, nbytes / len(places))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ranges", [(), ((2, 3),), ((5, 105),), ((3, 13), (10, 30)), ((0, 4), (2, 9), (1, 6))])
def test_coordinates_and_what_the_digest_changes_by(ranges, dtype):
    shape = [b - a for a, b in ranges]
    n = torch.Size(shape).numel()
    old, along = random_bits(n, dtype, 0), [range(a, b) for a, b in ranges]
    places = torch.arange(0, n, 9)
    new = changed(old, places, 3, near=False)
    piece = Changes(tensor=7, ranges=ranges, positions=places, steps=None, values=bits_of(new)[places])
    coordinates = module.Together([piece, piece]).coordinates
    coordinates = [along[len(places) :] for along in coordinates]
    expected = (
        torch.tensor([[a for a, _ in ranges]])
        + torch.stack(torch.unravel_index(places, shape or (1,)), 1)[:, : len(shape)]
    )
    assert torch.equal(
        torch.stack(coordinates, 1) if ranges else torch.zeros(len(places), 0, dtype=torch.int64), expected
    )
    before, after = (value_digest(x.view(shape), 7, range(len(shape)), along) for x in (old, new))
    was, now = bits_of(old)[places], bits_of(new)[places]
    assert (before + module.digest_of([piece], [was], [now])) % (1 << 64) == after
    twice = module.digest_of([piece, piece], [was, was], [now, now])
    assert (2 * before + twice) % (1 << 64) == 2 * after % (1 << 64)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_changed_frame_is_changes_within_the_piece_or_an_error(data):
    old = torch.zeros(500, dtype=torch.bfloat16)
    new = changed(old, torch.arange(0, 500, 10), 0, near=True)
    held = bits_of(old).clone()
    frame = encode(
        [(0, find(held, new)), (1, module.Found(positions=torch.tensor([3]), old=held[:1], new=held[1:2]))], "ulp"
    )
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, frame.numel() - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, frame.numel() // 8)) * 8] if data.draw(st.booleans()) else frame
    try:
        pieces = list(decode(frame, [(0, ((0, 500),), torch.bfloat16), (1, ((0, 8),), torch.bfloat16)]))
    except ValueError as error:
        assert str(error).startswith("weight changes: expected")
        return
    for piece in pieces:
        assert piece.positions.numel() == 0 or int(piece.positions[-1]) < piece.ranges[0][1]
        assert piece.bits(torch.zeros(piece.positions.numel(), dtype=torch.int16)).shape == piece.positions.shape

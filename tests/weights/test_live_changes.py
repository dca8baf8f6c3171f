"""Changed elements written into live parameters: as if all values had been written, and nothing else touched."""

import random

import pytest
import torch
from live_model import MANIFEST, experts, in_blocks, live, loader, recorded, weights
from sampling import sampled

from megatron_scalerl.weights.changes import Changes, bits_of, decode, encode, find
from megatron_scalerl.weights.live_changes import write_changes
from megatron_scalerl.weights.live_map import record_copies
from megatron_scalerl.weights.live_weights import live_views
from megatron_scalerl.weights.plan import manifest_of


def some_changed(values, rng):
    """A copy with some elements changed."""
    found = values.clone()
    n = values.numel()
    places = [i for i in range(n) if rng.random() < 0.1][: n // 8] or [rng.randrange(n)]
    found.view(-1)[places] = torch.tensor([rng.uniform(-2, 2) for _ in places]).to(values.dtype)
    return found


def changes_of(number, ranges, old, new):
    """What arrives of a rectangle."""
    cut = tuple(slice(a, b) for a, b in ranges)
    found = find(bits_of(old[cut].contiguous()).reshape(-1).clone(), new[cut])
    [piece] = decode(encode([(0, found)]), [(number, ranges, old.dtype)])
    return piece


def cut_in_two(ranges, rng):
    """A rectangle's two halves along some dimension."""
    if not ranges:
        return [ranges]
    axis = rng.randrange(len(ranges))
    a, b = ranges[axis]
    middle = rng.randrange(a, b + 1)
    halves = [(*ranges[:axis], half, *ranges[axis + 1 :]) for half in ((a, middle), (middle, b))]
    return [half for half in halves if half[axis][0] < half[axis][1]]


@pytest.mark.parametrize("seed", sampled("live changes", range(8), 3))
@pytest.mark.parametrize("rank, tp", [(0, 1), (0, 2), (1, 2)])
def test_changes_are_what_the_loader_writes(rank, tp, seed):
    rng, old = random.Random(seed), weights(seed)
    new = {name: some_changed(values, rng) for name, values in old.items()}
    expected, parameters = live(tp), live(tp)
    loader(expected, rank, tp)(new.items())
    parts, needed = recorded(loader(parameters, rank, tp), MANIFEST, parameters)
    loader(parameters, rank, tp)(old.items())
    for number, name in enumerate(old):
        arrived = []
        for ranges in (half for whole in needed[name] for half in cut_in_two(whole, rng)):
            cut = tuple(slice(a, b) for a, b in ranges)
            places = (old[name][cut] != new[name][cut]).reshape(-1).nonzero().flatten()
            values = new[name][cut].reshape(-1)[places]
            arrived.append((parts[name], Changes(tensor=number, ranges=ranges, positions=places, values=values)))
        write_changes(arrived)
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


@pytest.mark.parametrize("fused", [True, False])
def test_changes_of_experts_in_blocks_of_rows(fused):
    rng, (manifest, load) = random.Random(0), experts(fused, "bfloat16")
    parameter, expected = torch.zeros(3, 80, 6).bfloat16(), torch.zeros(3, 80, 6).bfloat16()
    parts, _ = recorded(lambda given: load(given, parameter), manifest, {"w13": parameter}, {"w13"})
    old = {meta.name: torch.randn(meta.shape).bfloat16() for meta in manifest}
    new = {name: some_changed(values, rng) for name, values in old.items()}
    for number, (name, value) in enumerate(old.items()):
        ranges = tuple((0, size) for size in value.shape)
        for part in parts[name]:
            part.write(ranges, value)
        write_changes([(parts[name], changes_of(number, ranges, value, new[name]))])
    load(new.items(), expected)
    assert torch.equal(parameter, in_blocks(expected))


def test_a_wider_parameter_and_a_scalar():
    parameters = {"norm": torch.zeros(16)}
    manifest, old = manifest_of([("plain", "bfloat16", (16,))]), torch.randn(16).bfloat16()
    parts = live_views(record_copies(loader(parameters, 0), manifest, parameters), manifest, parameters)["plain"]
    parts[0].write(((0, 16),), old)
    new = old.clone()
    new[[3, 9]] += 1
    write_changes([(parts, changes_of(0, ((0, 16),), old, new))])
    assert torch.equal(parameters["norm"], new.float())

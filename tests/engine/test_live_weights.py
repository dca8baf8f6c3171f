"""Parts of tensors written into live parameters: any rectangle, in any order, as the loader would have put it."""

from __future__ import annotations

import random

import pytest
import torch
from test_live_map import MANIFEST, SHAPES, live, loader, weights

from megatron_scalerl.engine.live_map import record
from megatron_scalerl.engine.live_weights import live_parts
from megatron_scalerl.weights.plan import manifest_of


def pieces(shape, rng):
    """Rectangles that make up a tensor: cut at random, shuffled."""
    found = [()]
    for size in shape:
        cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(2))})
        found = [(*ranges, along) for ranges in found for along in zip(cuts, cuts[1:])]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (0, 2), (1, 2)])
def test_pieces_in_any_order_are_what_the_loader_writes(rank, tp, seed):
    rng, values = random.Random(seed), weights(seed)
    expected, parameters = live(tp), live(tp)
    loader(expected, rank, tp)(values.items())
    parts = live_parts(record(loader(parameters, rank, tp), MANIFEST, parameters), MANIFEST, parameters)
    for name, shape in SHAPES.items():
        for ranges in pieces(shape, rng):
            for part in parts[name]:
                part.write(ranges, values[name][tuple(slice(a, b) for a, b in ranges)])
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


def test_a_piece_changes_nothing_else():
    parameters = live()
    parts = live_parts(record(loader(parameters, 0), MANIFEST, parameters), MANIFEST, parameters)
    [part] = parts["gate"]
    part.write(((1, 3), (2, 4)), torch.full((2, 2), 7.0))
    changed = (parameters["gate_up"] != -1.0).nonzero().tolist()
    assert changed == [[1, 2], [1, 3], [2, 2], [2, 3]]
    part.write(((4, 8), (0, 6)), torch.zeros(4, 6))  # the other worker's
    assert len((parameters["gate_up"] != -1.0).nonzero()) == 4


def test_bfloat16_from_the_wire_becomes_the_parameters_type():
    parameters = {"norm": torch.zeros(6)}
    manifest = manifest_of([("plain", "bfloat16", (6,))])
    parts = live_parts(record(loader(parameters, 0), manifest, parameters), manifest, parameters)
    parts["plain"][0].write(((2, 5),), torch.tensor([1.0, 2.0, 3.0]).bfloat16())
    assert parameters["norm"].tolist() == [0, 0, 1, 2, 3, 0]


def test_a_copy_across_dimensions_is_refused():
    parameters = {"flat": torch.zeros(48)}
    manifest = manifest_of([("q", "float32", (8, 6))])
    scatters = record(
        lambda given: [parameters["flat"].data.copy_(w.flatten()) for _, w in given], manifest, parameters
    )
    with pytest.raises(NotImplementedError, match="weights: q: expected dimension 0 of flat along one of its own"):
        live_parts(scatters, manifest, parameters)

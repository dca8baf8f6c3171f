"""The map from Hugging Face tensors to live parameters, recorded from loaders like vLLM's."""

from types import SimpleNamespace

import pytest
import torch
from live_model import MANIFEST, SHAPES, live, loader

from megatron_scalerl.weights.live_map import Scatter, needs, record_copies, unfilled_parameters


@pytest.mark.parametrize("rank, tp", [(0, 1), (0, 2), (1, 2)])
def test_recording_copies_nothing_and_finds_the_padding(rank, tp):
    parameters = live(tp)
    scatters = record_copies(loader(parameters, rank, tp), MANIFEST, parameters)
    assert all(torch.equal(parameters[name], untouched) for name, untouched in live(tp).items())
    padding = {(0, 1): 6, (0, 2): 0, (1, 2): 6}[rank, tp]  # rows of 16, of which 10 are in the checkpoint
    problems = unfilled_parameters(scatters, parameters, SimpleNamespace(get_submodule=lambda prefix: None))
    assert problems == ({"embedding": f"{6 * padding} values are missing"} if padding else {})


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_worker_needs_by_hand(rank):
    """That it is what the loader reads: test_live_weights.py."""
    parameters = live()
    found = needs(record_copies(loader(parameters, rank), MANIFEST, parameters), MANIFEST)
    rows = {0: (0, 4), 1: (4, 8)}[rank]
    assert found["q"] == found["gate"] == found["up"] == ((rows, (0, 6)),)
    assert found["down"] == (((0, 6), rows),) and found["plain"] == (((0, 6),),) and found["scalar"] == ((),)
    assert found["vocab"] == ((((0, 8), (8, 10))[rank], (0, 6)),)
    assert found["experts"] == (((0, 4), (0, 6), (5 * rank, 5 * rank + 5)),), "four experts, one rectangle"


def test_a_tensor_that_is_not_loaded_is_not_needed():
    parameters = live()
    scatters = record_copies(lambda given: [None for _ in given], MANIFEST, parameters)
    assert scatters == [] and set(needs(scatters, MANIFEST).values()) == {()}


def test_halves_that_a_loader_swaps_are_needed_whole():
    """The steps go back behind the first element that is copied."""

    def load(pairs):
        for name, tensor in pairs:
            if name == "q":
                parameters["q"].data.copy_(torch.cat([tensor[4:], tensor[:4]]))

    parameters = {"q": torch.nn.Parameter(torch.zeros(SHAPES["q"]))}
    [scatter] = record_copies(load, MANIFEST, parameters)
    rows, columns = SHAPES["q"]
    assert scatter.steps[0].min() < 0
    assert needs([scatter], MANIFEST)["q"] == (((0, rows), (0, columns)),)


def test_needs_that_overlap_are_sent_once():
    def scatter(first, rows):
        steps = (torch.arange(rows) * 6, torch.arange(6))
        where = {"tensor": "q", "parameter": "qkv", "offset": 0, "stride": (6, 1), "source_offset": first * 6}
        return Scatter(shape=(rows, 6), steps=steps, **where)

    assert needs([scatter(0, 3), scatter(2, 4)], MANIFEST)["q"] == (((0, 6), (0, 6)),)
    assert needs([scatter(0, 2), scatter(4, 2)], MANIFEST)["q"] == (((0, 2), (0, 6)), ((4, 6), (0, 6)))


@pytest.mark.parametrize(
    "load, message",
    [
        (lambda p, w: p["norm"].data.copy_(w * 2), "plain: .*mul"),
        (lambda p, w: torch.empty(6).copy_(w), "plain: .*no parameter"),
        (lambda p, w: p["scale"].data.copy_(w), r"plain: .*\(6,\) .*\(1,\)"),
        (lambda p, w: p["norm"].data.copy_(w.mul_(2)), "plain: .*mul_"),
        (lambda p, w: p["norm"].data.copy_(w.__iadd__(1)), "plain: .*(__iadd__|add_)"),
        (lambda p, w: torch.mul(w, 2, out=w), "plain: .*mul"),
        (lambda p, w: p["norm"].data.__setitem__(slice(None), w), "plain: .*__setitem__"),
        (lambda p, w: p["norm"].data.add_(w), "plain: .*add_"),
        (lambda p, w: w.copy_(torch.ones(6)), "weights: the loader may copy only tensors"),
    ],
)
def test_what_cannot_be_followed_is_named(load, message):
    parameters = live()
    with pytest.raises(NotImplementedError, match=message):
        record_copies(
            lambda given: [load(parameters, w) for name, w in given if name == "plain"], MANIFEST, parameters
        )

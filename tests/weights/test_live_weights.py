"""Parts of tensors written into live parameters: any rectangle, in any order, as the loader would have put it."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from live_model import MANIFEST, experts, in_blocks, live, loader, recorded, weights
from sampling import sampled

from megatron_scalerl.weights.digest import total, value_digest
from megatron_scalerl.weights.live_map import record_copies
from megatron_scalerl.weights.live_weights import LiveWeights, live_views
from megatron_scalerl.weights.plan import manifest_of


def held(parts, number):
    """The digest of a tensor's live parts."""
    return total([part.digest(number, torch.float32) for part in parts])


def pieces(shape, rng):
    """Rectangles that make up a tensor: cut at random, shuffled."""
    found = [()]
    for size in shape:
        cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(2))})
        found = [(*ranges, along) for ranges in found for along in pairwise(cuts)]
    rng.shuffle(found)
    return found


def write(parts, values, rng):
    """Every tensor, piece by piece."""
    for name, value in values.items():
        for ranges in pieces(value.shape, rng):
            for part in parts[name]:
                part.write(ranges, value[tuple(slice(a, b) for a, b in ranges)])


@pytest.mark.parametrize("seed", sampled("live weights", range(5), 2))
@pytest.mark.parametrize("rank, tp", [(0, 1), (0, 2), (1, 2)])
def test_pieces_in_any_order_are_what_the_loader_writes_and_have_the_digest_of_what_was_sent(rank, tp, seed):
    rng, values = random.Random(seed), weights(seed)
    expected, parameters = live(tp), live(tp)
    loader(expected, rank, tp)(values.items())
    parts, needed = recorded(loader(parameters, rank, tp), MANIFEST, parameters)
    write(parts, values, rng)
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    for number, (name, value) in enumerate(values.items()):
        before = held(parts[name], number)
        sent = []
        for ranges in needed[name]:
            rectangle, along = value[tuple(slice(a, b) for a, b in ranges)], [range(a, b) for a, b in ranges]
            sent.append(value_digest(rectangle, number, range(value.dim()), along))
        assert before == total(sent)
        part = rng.choice(parts[name])
        place = tuple(rng.randrange(size) for size in part.live.shape)
        part.live.view(torch.int32)[place] ^= 1 << rng.randrange(31)
        assert held(parts[name], number) != before


def wider():
    """A parameter in float32, and the view of a tensor in bfloat16 in it."""
    parameters = {"norm": torch.full((6,), 0.1)}
    manifest = manifest_of([("plain", "bfloat16", (6,))])
    [part] = live_views(record_copies(loader(parameters, 0), manifest, parameters), manifest, parameters)["plain"]
    return parameters["norm"], part


def test_a_wider_parameter_holds_values_of_the_tensors_type():
    (parameter, part), values = wider(), torch.randn(6).bfloat16()
    zeros = value_digest(torch.zeros(6).bfloat16(), 0, (0,), (range(6),))
    assert zeros == 0 != part.digest(0, torch.bfloat16), "other values are not taken for zeros"
    part.write(((0, 6),), values)
    sent = value_digest(values, 0, (0,), (range(6),))
    assert part.digest(0, torch.bfloat16) == sent
    parameter.view(torch.int32)[2] ^= 1  # below the resolution of bfloat16
    assert part.digest(0, torch.bfloat16) != sent
    part.write(((2, 5),), torch.tensor([1.0, 2.0, 3.0]).bfloat16())
    assert parameter[2:5].tolist() == [1, 2, 3]


class Quantized(torch.nn.Module):
    """A model with one layer that has another precision, and a loader like vLLM's."""

    class Int8Method:
        """Named unlike vLLM's methods of plain weights."""

    def __init__(self, kind):
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(6), requires_grad=False)
        if kind == "method":
            self.quant_method = self.Int8Method()
        elif kind == "scale":
            self.scale = torch.nn.Parameter(torch.zeros(6, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.kind = kind

    def load_weights(self, given):
        for _, weight in given:
            self.norm.data.copy_(weight)
        if self.kind == "after":
            self.norm.data.copy_(-torch.exp(self.norm.data))


@pytest.mark.parametrize(
    "kind, line",
    [
        ("method", "weights: .*Int8Method"),
        ("scale", "weights: scale: .*torch.float8_e4m3fn"),
        ("after", "weights: norm: .*more than copy"),
    ],
)
def test_models_whose_loader_changes_values_are_left_to_it(kind, line):
    manifest = manifest_of([("plain", "float32", (6,))])
    assert LiveWeights(Quantized("none"), manifest).needs == ((((0, 6),),),)
    with pytest.raises(NotImplementedError, match=line):
        LiveWeights(Quantized(kind), manifest)


@pytest.mark.parametrize("seed", sampled("live weights", range(5), 2))
@pytest.mark.parametrize("fused", [True, False])
def test_experts_in_blocks_of_rows(fused, seed):
    rng, (manifest, load) = random.Random(seed), experts(fused, "float32")
    parameter, expected = torch.zeros(3, 80, 6), torch.zeros(3, 80, 6)
    values = {meta.name: torch.randn(meta.shape) for meta in manifest}
    load(values.items(), expected)
    parts, _ = recorded(lambda given: load(given, parameter), manifest, {"w13": parameter}, {"w13"})
    write(parts, values, rng)
    assert torch.equal(parameter, in_blocks(expected))
    for number, (name, value) in enumerate(values.items()):
        along = [range(size) for size in value.shape]
        whole = value_digest(value, number, range(value.dim()), along)
        assert held(parts[name], number) == whole


def test_a_piece_changes_nothing_else():
    parameters = live()
    parts = live_views(record_copies(loader(parameters, 0), MANIFEST, parameters), MANIFEST, parameters)
    [part] = parts["gate"]
    part.write(((1, 3), (2, 4)), torch.full((2, 2), 7.0))
    changed = (parameters["gate_up"] != -1.0).nonzero().tolist()
    assert changed == [[1, 2], [1, 3], [2, 2], [2, 3]]
    part.write(((4, 8), (0, 6)), torch.zeros(4, 6))  # the other worker's
    assert len((parameters["gate_up"] != -1.0).nonzero()) == 4


def test_a_copy_across_dimensions_is_refused():
    parameters = {"flat": torch.zeros(48)}
    manifest = manifest_of([("q", "float32", (8, 6))])
    scatters = record_copies(
        lambda given: [parameters["flat"].data.copy_(w.flatten()) for _, w in given], manifest, parameters
    )
    with pytest.raises(NotImplementedError, match="weights: q: dimension 0 of flat"):
        live_views(scatters, manifest, parameters)


class Latent(torch.nn.Module):
    """Two parts of a projection, as vLLM's latent attention has them: in views of it, or in memory of their own."""

    def __init__(self, views, gathered=None):
        super().__init__()
        self.calls = 0
        self.kv_b_proj = torch.nn.Linear(3, 4, bias=False).requires_grad_(False)
        self.attention = torch.nn.Module()
        self.attention.kv_b_proj = self.kv_b_proj
        self.attention.process_weights_after_loading = self.absorb
        self.attention.W_UK_T_dcp_qrep = gathered
        for name, part in zip(("W_UK_T", "W_UV"), self.kv_b_proj.weight.data.split(2)):
            part = part if views else part.clone()
            self.attention.register_parameter(name, torch.nn.Parameter(part, requires_grad=False))

    def absorb(self, dtype):
        assert dtype is torch.float32
        self.calls += 1
        for name, part in zip(("W_UK_T", "W_UV"), self.kv_b_proj.weight.split(2)):
            getattr(self.attention, name).copy_(part)

    def load_weights(self, given):
        for _, weight in given:
            self.kv_b_proj.weight.data.copy_(weight)


@pytest.mark.parametrize("views", [True, False])
def test_the_absorbed_parts_of_latent_attention_follow_their_projection(views):
    model = Latent(views)
    found = LiveWeights(model, manifest_of([("kv_b", "float32", (4, 3))]))
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    found.write(SimpleNamespace(tensor=0, ranges=((0, 4), (0, 3)), values=weight))
    found.finish()
    assert torch.equal(torch.cat([model.attention.W_UK_T, model.attention.W_UV]), weight)
    assert found.digest() == total([value_digest(weight, 0, (0, 1), (range(4), range(3)))])


def test_parts_that_a_group_gathers_are_made_again_on_every_worker():
    """Also on one whose delta changes nothing: the others wait for it."""
    for gathered, calls in ((None, 0), (torch.zeros(1), 1)):
        model = Latent(True, gathered)
        LiveWeights(model, manifest_of([("kv_b", "float32", (4, 3))])).finish()
        assert model.calls == calls

"""Packed rows in Transformer Engine's format take the same step: Megatron's RoPE, chunks, attention temperature.

Why this matters: this is the path of every GPU run. A reference replaces Transformer Engine's attention, so what is
shown is everything around it: boundaries, the rotary angles that Megatron looks up, the query scale, and the order of
tokens under context parallelism. Not exercised: Transformer Engine itself.
"""

import pytest
import random_policies
from layouts import layout, same_step
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POLICIES = {
    "llama": ("llama", {}),
    "llama4": ("llama4", {}),
    "llama4 one chunk": ("llama4", {"attention_chunk_size": 64}),
}
ALONE = ("llama", "llama4")
TWO_RANKS = {
    "llama cp2": ("llama", layout("whole cp2")),
    "llama4 tp2 sp": ("llama4", layout("whole tp2 sp")),
    "llama4 one chunk cp2": ("llama4 one chunk", layout("whole cp2")),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    for name, (kind, settings) in POLICIES.items():
        random_policies.make(kind, root / name, **settings)
    return {name: str(root / name) for name in POLICIES}


@pytest.fixture(scope="module")
def expected(paths):
    return run_ranks(1, "parity_ranks:many", [(name, path, layout("whole")) for name, path in paths.items()])[0]


@pytest.fixture(scope="module")
def found(paths):
    one = run_ranks(1, "varlen_ranks:many", [(name, paths[name], layout("whole")) for name in ALONE])[0]
    jobs = [(name, paths[kind], keys) for name, (kind, keys) in TWO_RANKS.items()]
    return one | run_ranks(2, "varlen_ranks:many", jobs)[0]


@pytest.mark.parametrize("name", [*ALONE, *TWO_RANKS])
def test_the_step_is_that_of_our_attention(name, found, expected):
    kind = TWO_RANKS[name][0] if name in TWO_RANKS else name
    same_step(found[name], expected[kind])
    assert (found[name]["logprobs"] - expected[kind]["logprobs"]).abs().max() < 5e-5


def test_chunks_make_a_difference(expected):
    assert (expected["llama4"]["logprobs"] - expected["llama4 one chunk"]["logprobs"]).abs().max() > 0.1

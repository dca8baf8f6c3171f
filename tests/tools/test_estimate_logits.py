"""The estimate of the logit projection counts the products that the projection launches."""

from __future__ import annotations

from estimate_logits import FLOPS, estimate


def test_what_is_counted():
    """A small vocabulary, so that chunks take everything at once: three products, each a part of a wave of tiles."""
    once = 2.0 * 2048 * 1024 * 16384 / FLOPS
    found = estimate(2048, 1024, 16384, "in_place", 512, in_chunk=True)
    assert (found["chunk"], found["products"]) == (2048, 3)
    assert 1e3 * 3 * once < found["ms"] < 1e3 * 12 * once
    twice = estimate(2048, 1024, 16384, "cuda", 512, in_chunk=False)
    assert twice["chunk"] == 0 and twice["products"] > 3 and twice["of_gemms"] < found["of_gemms"]


def test_a_thin_chunk_is_two_passes():
    thin = estimate(8192, 4096, 128256, "cuda", 512, in_chunk=True)
    assert thin["chunk"] == 0
    assert thin | {"in_chunk": False} == estimate(8192, 4096, 128256, "cuda", 512, in_chunk=False)

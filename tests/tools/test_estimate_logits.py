"""The estimate of the logit projection counts the products that the projection launches."""

from estimate_logits import FLOPS, estimate


def test_what_is_counted():
    """A chunk of everything is three products; two passes are four GEMMs, in blocks of the vocabulary."""
    tokens, hidden, columns = 16384, 4096, 16384
    once = 1e3 * 2.0 * tokens * hidden * columns / FLOPS
    found = estimate(tokens, hidden, columns, 2048, in_chunk=True)
    assert (found["chunk"], found["products"]) == (tokens, 1 + 2 * 2)  # its gradient in two halves of 8,192 columns
    assert 3 * once < found["ms"] < 4 * once
    twice = estimate(tokens, hidden, columns, 512, in_chunk=False)
    assert twice["chunk"] == 0 and twice["products"] > 4 and 4 * once < twice["ms"]


def test_a_thin_chunk_is_two_passes():
    thin = estimate(8192, 4096, 128256, 512, in_chunk=True)
    assert thin["chunk"] == 0
    assert thin | {"in_chunk": False} == estimate(8192, 4096, 128256, 512, in_chunk=False)

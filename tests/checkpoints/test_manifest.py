"""Manifest and buckets of a weight update, computed by hand."""

import pytest

from megatron_scalerl.checkpoints.manifest import ParamMeta, buckets, from_json, manifest_digest, manifest_of, to_json

ITEMS = [("a", "float32", (3,)), ("b", "bfloat16", (2, 5)), ("c", "float32", (1 << 18,)), ("d", "float32", ())]


def test_buckets_are_packed_in_order_and_aligned():
    first, second, third = buckets(manifest_of(ITEMS), bucket_mib=1)
    # 12 bytes -> 16, 20 bytes -> 32, then a parameter of exactly 1 MiB, then a scalar
    assert [(s.meta.name, s.offset) for s in first.slots] == [("a", 0), ("b", 16)] and first.nbytes == 48
    assert [(s.meta.name, s.offset) for s in second.slots] == [("c", 0)] and second.nbytes == 1 << 20
    assert [(s.meta.name, s.offset) for s in third.slots] == [("d", 0)] and third.nbytes == 16


def test_a_parameter_larger_than_a_bucket_is_alone():
    big = manifest_of([("a", "uint8", (5,)), ("b", "float32", (3 << 18,)), ("c", "uint8", (1,))])
    assert [b.nbytes for b in buckets(big, bucket_mib=1)] == [16, 3 << 20, 16]


def test_json_round_trip_and_a_digest_that_changes_with_every_field():
    manifest = manifest_of(ITEMS)
    assert from_json(to_json(manifest)) == manifest
    changed = [ITEMS[::-1], [("x", *ITEMS[0][1:]), *ITEMS[1:]], [("a", "int32", (3,)), *ITEMS[1:]], ITEMS[:3]]
    changed.append([("a", "float32", (3, 1)), *ITEMS[1:]])
    assert len({manifest_digest(manifest_of(items)) for items in [ITEMS, *changed]}) == 6


@pytest.mark.parametrize(
    ("items", "line"),
    [
        ([], "expected at least one parameter, found none"),
        ([("a", "float32", (1,)), ("a", "float32", (1,))], "expected every name once, found a twice"),
        ([("a", "float8", (1,))], r"weights: a: expected one of .*, found float8"),
    ],
)
def test_refused_manifests(items, line):
    with pytest.raises(ValueError, match=line):
        manifest_of(items)


def test_size_of_a_parameter():
    assert ParamMeta(name="a", dtype="bfloat16", shape=(3, 5)).nbytes == 30

"""The plan of a weight update: coverage of every tensor, buckets, splitting; computed by hand."""

import msgspec
import pytest
from worker_needs import whole_plan

from megatron_scalerl.weights import plan as plans
from megatron_scalerl.weights.plan import Part, WeightPlan, buckets, manifest_of, overlap, volume

ITEMS = [("a", "float32", (3,)), ("b", "bfloat16", (2, 5)), ("c", "float32", (1 << 18,)), ("d", "float32", ())]


def of(*items, parts, senders=1, needs=None):
    """A plan of parts (tensor, sender, ranges), all for one shard."""
    manifest = manifest_of(items)
    made = tuple(Part(tensor, sender, 0, ranges) for tensor, sender, ranges in parts)
    return WeightPlan(parameters=manifest, senders=senders, needs=(needs or plans.all_of(manifest),), parts=made)


def test_buckets_are_packed_in_order_and_aligned():
    first, second, third = buckets(whole_plan(manifest_of(ITEMS)), bucket_mib=1)
    # 12 bytes -> 16, 20 bytes -> 32, then a tensor of exactly 1 MiB, then a scalar
    assert [(s.part, s.offset, s.nbytes) for s in first.slots] == [(0, 0, 12), (1, 16, 20)] and first.nbytes == 48
    assert [(s.part, s.offset, s.nbytes) for s in second.slots] == [(2, 0, 1 << 20)] and second.nbytes == 1 << 20
    assert [(s.part, s.offset, s.ranges) for s in third.slots] == [(3, 0, ())] and third.nbytes == 16


@pytest.mark.parametrize("shape", [(5 << 17,), (3, 1 << 18), (2, 3, 1 << 17), (1, 1, 3 << 18), (7, 100_000)])
def test_no_bucket_is_larger_than_its_limit_and_none_is_lost(shape):
    found = buckets(whole_plan(manifest_of([("x", "uint8", (5,)), ("big", "float32", shape)])), bucket_mib=1)
    assert max(bucket.nbytes for bucket in found) <= 1 << 20
    pieces = [slot.ranges for bucket in found for slot in bucket.slots if slot.part == 1]
    plans.check(of(("big", "float32", shape), parts=[(0, 0, ranges) for ranges in pieces]))
    assert len(pieces) <= 2 * (4 * volume([(0, n) for n in shape]) // (1 << 20) + 1)


def test_buckets_of_the_senders_take_turns():
    half = 1 << 18
    matrix = ("m", "float32", (4, half))
    rows = [(0, row % 2, ((row, row + 1), (0, half))) for row in range(4)]
    found = buckets(of(matrix, ("n", "uint8", (1,)), parts=[*rows, (1, 1, ((0, 1),))], senders=2), bucket_mib=1)
    assert [(b.sender, b.slots[0].ranges[0]) for b in found] == [
        (0, (0, 1)),
        (1, (1, 2)),
        (0, (2, 3)),
        (1, (3, 4)),
        (1, (0, 1)),
    ]


def test_json_round_trip_and_a_digest_that_changes_with_every_field():
    one = whole_plan(manifest_of(ITEMS))
    assert plans.from_json(plans.to_json(one)) == one
    changed = [ITEMS[::-1], [("x", *ITEMS[0][1:]), *ITEMS[1:]], [("a", "int32", (3,)), *ITEMS[1:]], ITEMS[:3]]
    found = [one, *(whole_plan(manifest_of(items)) for items in changed)]
    halves = [(0, 0, ((0, 1),)), (0, 0, ((1, 3),))]
    found += [of(ITEMS[0], parts=halves), of(ITEMS[0], parts=halves, senders=2)]
    found.append(of(ITEMS[0], parts=[halves[0], (0, 1, ((1, 3),))], senders=2))
    assert len({plan.digests for plan in found}) == len(found)


@pytest.mark.parametrize(
    "parts, line",
    [
        ([(0, 0, ((0, 2), (0, 3)))], "m: .*not sent"),
        ([(0, 0, ((0, 4), (0, 3))), (0, 0, ((3, 4), (1, 2)))], "m: .*sent twice"),
        ([(0, 0, ((0, 4), (0, 4)))], r"m: the rectangle .*\(4, 3\)"),
        ([(0, 0, ((-1, 4), (0, 3)))], r"m: the rectangle .*\(4, 3\)"),
        ([(0, 0, ((2, 2), (0, 3)))], r"m: the rectangle .*\(4, 3\)"),
        ([(0, 0, ((0, 4),))], r"m: the rectangle .*\(4, 3\)"),
        ([(1, 0, ((0, 4), (0, 3)))], "Part.* is not in the plan of 1 tensors, 1 senders, 1 shards"),
        ([(0, 1, ((0, 4), (0, 3)))], "Part.* is not in the plan of 1 tensors, 1 senders, 1 shards"),
        ([], "m: .*not sent"),
        (
            [(0, 0, ((0, 2), (0, 2))), (0, 0, ((2, 4), (1, 3))), (0, 0, ((0, 2), (2, 3))), (0, 0, ((2, 4), (0, 1)))],
            "",
        ),
    ],
)
def test_a_plan_sends_every_element_once(parts, line):
    text = plans.to_json(of(("m", "float32", (4, 3)), parts=parts))
    if not line:
        assert len(plans.from_json(text).parts) == 4
        return
    with pytest.raises(ValueError, match=f"weights: .*{line}"):
        plans.from_json(text)


def test_what_an_engine_takes_is_counted_and_not_compared_pair_by_pair():
    manifest = manifest_of([("m", "float32", (4096, 2))])
    rows = tuple(((i, i + 1), (0, 2)) for i in range(4096))
    assert plans.not_covered(manifest, [(rows[::2],), (rows[1::2],)]) == ""
    assert plans.not_covered(manifest, [(rows[::2],), (rows[1:-1:2],)]).startswith("weights: m: ")
    assert plans.not_covered(manifest, [(rows[:3000],), (rows[1000:],)]) == ""


@pytest.mark.parametrize(
    "items, line",
    [
        ([], "weights: .*no tensor"),
        ([("a", "float32", (1,)), ("a", "float32", (1,))], "weights: a .*twice"),
        ([("a", "float8", (1,))], "weights: a: the type is float8, not one of"),
        ([("a", "float32", (-1,))], r"weights: a .*\(-1,\)"),
    ],
)
def test_refused_manifests(items, line):
    with pytest.raises(ValueError, match=line):
        manifest_of(items)


ROWS = {n: ((n, n + 1), (0, 3)) for n in range(4)}


def test_a_shard_gets_what_it_needs_and_nothing_else():
    needs = (((ROWS[0], ROWS[2]),), ((((1, 4), (0, 3)),),), ((),))
    matrix = manifest_of([("m", "float32", (4, 3))])
    parts = [Part(0, 0, 0, ROWS[0]), Part(0, 1, 0, ROWS[2]), *(Part(0, n % 2, 1, ROWS[n]) for n in (1, 2, 3))]
    plan = WeightPlan(parameters=matrix, senders=2, needs=needs, parts=tuple(parts))
    plans.check(plan)
    assert plans.from_json(plans.to_json(plan)) == plan and len(set(plan.digests)) == 3
    found = [(b.sender, b.shard, b.nbytes) for b in buckets(plan, 1)]
    assert found == [(0, 0, 16), (0, 1, 16), (1, 0, 16), (1, 1, 32)]
    for shard, digest in enumerate(plan.digests):
        own = plans.from_json(plans.to_json(plan.of_shard(shard)))
        assert own.digests == (digest,)
        assert [(b.sender, shard, b.nbytes) for b in buckets(own, 1)] == [b for b in found if b[1] == shard]
    for extra, line in ((ROWS[3], "not needed"), (ROWS[2], "sent twice")):
        more = WeightPlan(parameters=matrix, senders=2, needs=needs, parts=(*parts, Part(0, 0, 0, extra)))
        with pytest.raises(ValueError, match=f"m: .*{line}"):
            plans.check(more)


@pytest.mark.parametrize(
    "needs, line",
    [
        ([[ROWS[0], ((0, 2), (1, 2))]], "m: .*needed twice"),
        ([[((0, 5), (0, 3))]], r"m: the rectangle .*\(4, 3\)"),
        ([], "shard 0 .* 0 tensors, .* 1 tensors"),
        ([[ROWS[0]], []], "shard 0 .* 2 tensors, .* 1 tensors"),
        ("all", "rectangles of every tensor"),
    ],
)
def test_needs_of_a_worker_are_checked(needs, line):
    manifest = manifest_of([("m", "float32", (4, 3))])
    with pytest.raises(ValueError, match=f"weights: .*{line}"):
        plans.needs_from_json(msgspec.json.encode(needs).decode(), manifest)


def test_needs_and_manifest_as_json():
    manifest, some = manifest_of([("m", "float32", (4, 3))]), ((ROWS[1], ROWS[3]),)
    assert plans.needs_from_json(plans.needs_to_json(some), manifest) == some
    assert plans.manifest_from_json(plans.manifest_to_json(manifest)) == manifest


def test_what_two_rectangles_have_in_common():
    assert overlap(((0, 4), (2, 6)), ((3, 8), (0, 3))) == ((3, 4), (2, 3))
    assert overlap(((0, 4),), ((4, 8),)) is None and overlap((), ()) == ()

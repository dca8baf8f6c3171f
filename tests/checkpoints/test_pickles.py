"""The decoder: plain values are decoded, and no name of a pickle is imported or called."""

from __future__ import annotations

import copyreg
import functools
import operator
import os
import pickle
import sys
import tracemalloc
from collections import OrderedDict

import pytest
from hostile import Evil

from megatron_scalerl.checkpoints.safe_pickles import Built, Maker, Refused, decode


class Noted(Built):
    """Accepts any state."""

    state = None

    def set_state(self, state):
        self.state = state
        return len(state) if type(state) is bytes else 0


def copied(text):
    """Makes bytes of text."""
    return text.encode()


def climbing():
    """Never ends."""
    return climbing()


NAMES = {
    ("house", "Noted"): Maker("Noted", Noted),
    ("house", "pair"): Maker("pair", lambda a, b: (a, b)),
    ("house", "copied"): Maker("copied", copied),
    ("house", "climbing"): Maker("climbing", climbing),
}

VALUES = [
    None,
    True,
    -1,
    255,
    65536,
    -(1 << 31),
    1 << 63,
    -(1 << 200),
    0.1,
    float("inf"),
    "",
    "häuser",
    "x" * 300,
    b"ab",
    b"z" * 300,
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    [],
    [1, [2, [3]]],
    {},
    {"a": {1: (2.5, None)}},
    {0: "", (1 << 17) - 1: ""},
    {"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(2000))},
]


# protocol 2 spells bytes as a call of _codecs.encode
CASES = [(value, protocol) for protocol in (2, 3, 4, 5) for value in VALUES if (protocol, type(value)) != (2, bytes)]


@pytest.mark.parametrize(("value", "protocol"), CASES, ids=lambda v: repr(v)[:20])
def test_plain_values_equal_those_of_pickle(value, protocol):
    found = decode(pickle.dumps(value, protocol), {})
    assert found == value and type(found) is type(value)


def test_the_same_part_twice_is_one_object():
    part = [1]
    found = decode(pickle.dumps([part, part]), {})
    assert found == [[1], [1]] and found[0] is found[1]


def test_a_name_maps_to_its_entry():
    data = pickle.PROTO + b"\x04chouse\nNoted\n" + b")\x81" + b"}X\x01\x00\x00\x00kK\x07s" + b"b."
    found = decode(data, NAMES)
    assert type(found) is Noted and found.state == {"k": 7}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda marker: Evil(marker), "posix.mkdir"),
        (lambda _: functools.partial(print), "functools.partial"),
        (lambda _: operator.attrgetter("a"), "operator.attrgetter"),
        (lambda _: getattr, "getattr"),
        (lambda _: OrderedDict, "collections.OrderedDict"),
        (lambda _: eval, "eval"),
        (lambda _: sys.exit, "sys.exit"),
    ],
    ids=["reduce", "partial", "operator", "getattr", "class", "eval", "exit"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_other_names_are_refused_by_name(value, name, protocol, tmp_path):
    with pytest.raises(Refused, match=rf"the name \S*{name}$"):
        decode(pickle.dumps(value(tmp_path / "made"), protocol), NAMES)
    assert not (tmp_path / "made").exists()


def test_a_dotted_name_is_another_name():
    """("house", "pair.__globals__") does not reach an attribute of ("house", "pair")."""
    others = [("house", "pair.__globals__"), ("house.pair", "call"), ("hous", "e.pair"), ("", "house.pair")]
    for module, name in others:
        data = pickle.PROTO + b"\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
        with pytest.raises(Refused, match=rf"the name {module}\.{name}"):
            decode(data + pickle.STACK_GLOBAL + b".", NAMES)


def test_a_name_cannot_control_a_terminal():
    with pytest.raises(Refused) as refused:
        decode(b"cos\x1b[2J\nsystem\n.", NAMES)
    assert str(refused.value) == "the name os\\x1b[2J.system"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"(iposix\nmkdir\n.", "the pickle opcode INST"),
        (b"(chouse\npair\nK\x01o.", "the pickle opcode OBJ"),
        (b"\x82\x01.", "the pickle opcode EXT1"),
        (b"\x92.", "the pickle opcode NEWOBJ_EX"),
        (b"P1\n.", "the pickle opcode PERSID"),
        (b"K\x01Q.", "a persistent id"),
        (b"K\x01)R.", "a call of a int"),
        (b"chouse\npair\n]R.", "a call of a Maker"),
        (b"chouse\npair\n)R.", "pair with other arguments"),
        (b"]}b.", "a state for a list"),
        (b"chouse\npair\n}b.", "a state for a Maker"),
        (b"chouse\nNoted\n)\x81K\x01a.", "items appended to a Noted"),
        (b"chouse\nNoted\n)\x81K\x01K\x01s.", "items set in a Noted"),
        (b"}K\x01\x85K\x01s.", "a tuple as a dictionary's key"),
        (b"}]K\x01s.", "a list as a dictionary's key"),
        (b"}G" + b"\0" * 8 + b"K\x01s.", "a float as a dictionary's key"),
        (b"}\x88K\x01s.", "a bool as a dictionary's key"),
        (b"}NK\x01s.", "a NoneType as a dictionary's key"),
        (b"}C\x01aK\x01s.", "a bytes as a dictionary's key"),
        (b"}J\0\0\x02\0K\x01s.", "a dictionary's key that is not from 0 to 131071"),
        (b"}J\xff\xff\xff\xffK\x01s.", "a dictionary's key that is not from 0 to 131071"),
        (b"}X\x01\x10\0\0" + b"k" * 4097 + b"K\x01s.", "a dictionary's key of 4097 characters"),
        (b")" + b"\x85" * 20 + b".", "tuples nested more than 16 deep"),
        (b"(" * 20 + b"t" * 20 + b".", "tuples nested more than 16 deep"),
        (b")" + b"q\0h\0\x86" * 20 + b".", "tuples nested more than 16 deep"),
        (b"chouse\nclimbing\n)R.", "values nested too deeply"),
        (b"chouse\nNoted\n(" + b"N" * 257 + b"tR.", "Noted with 257 arguments"),
        (b"Nr\x01\0\0\0.", "a damaged pickle"),
        (b"K\x01K\x01\x93.", "a name that is not text"),
        (b"\x80\xff.", "pickle protocol 255"),
        (b"", "a damaged pickle"),
        (b".", "a damaged pickle"),
        (b"K", "a damaged pickle"),
        (b"h\x07.", "a damaged pickle"),
        (b"t.", "a damaged pickle"),
        (b"\x85.", "a damaged pickle"),
        (b"cno newline", "a damaged pickle"),
        (b"\x8c\x02\xff\xff.", "a damaged pickle"),
    ],
)
def test_other_opcodes_and_calls_are_refused(data, found):
    with pytest.raises(Refused, match=found):
        decode(data, NAMES)


def test_the_registry_of_extensions_is_not_used():
    copyreg.add_extension("posix", "mkdir", 77)
    try:
        with pytest.raises(Refused, match="EXT1"):
            decode(pickle.dumps(os.mkdir, 2), NAMES)
    finally:
        copyreg.remove_extension("posix", "mkdir", 77)


@pytest.mark.parametrize(
    "data",
    [
        b"]r\xff\xff\xff\x7f.",  # a memo of two billion entries
        b"X\xff\xff\xff\xff.",  # four gigabytes of text
        b"B\xff\xff\xff\xff.",
        b"\x95" + b"\xff" * 8 + b".",  # a frame of 2**64 bytes
        b"K\x01" + b"2" * 1000 + b".",
        b"]" + b"\x85" * 100_000 + b".",  # nested a hundred thousand deep
        b"(" * 100_000 + b".",
    ],
    ids=["memo", "text", "bytes", "frame", "dup", "depth", "marks"],
)
def test_a_small_pickle_takes_little_memory(data):
    tracemalloc.start()
    try:
        decode(data, NAMES)
    except Refused:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 50_000 + 200 * len(data)


def test_a_number_cannot_be_long_without_its_bytes():
    with pytest.raises(Refused, match="damaged"):
        decode(b"\x8a\xff\x01.", NAMES)
    with pytest.raises(Refused, match="LONG4"):
        decode(b"\x8b\xff\xff\xff\x7f.", NAMES)


def test_integers_with_the_same_hash_are_refused_as_keys():
    """Inserting each would take as many steps as there are keys already."""
    with pytest.raises(Refused, match="a dictionary's key that is not from 0 to"):
        decode(pickle.dumps({n * ((1 << 61) - 1): 0 for n in range(1, 100)}, 4), {})


@pytest.mark.parametrize(
    "again",
    [b"h\x00h\x01R", b"h\x02)\x81h\x03b"],
    ids=["call", "state"],
)
def test_a_part_cannot_be_copied_over_and_over(again):
    """Five bytes of the pickle that take a hundred thousand."""
    size = (100_000).to_bytes(4, "little")
    parts = b"chouse\ncopied\nq\0X" + size + b"x" * 100_000 + b"\x85q\x01"
    parts += b"chouse\nNoted\nq\x02B" + size + b"x" * 100_000 + b"q\x03"
    assert decode(parts + again * 3 + b".", NAMES)
    with pytest.raises(Refused, match="parts copied over and over"):
        decode(parts + again * 1000 + b".", NAMES)

"""Pickles as data: plain values are opened, and no name outside the allowlist is imported or called."""

import copyreg
import functools
import operator
import os
import pickle
import sys
from collections import OrderedDict

import pytest
from hostile import Evil

from megatron_scalerl.checkpoints import safe_pickles
from megatron_scalerl.checkpoints.safe_pickles import Maker, PickledObject, RefusedPickle


class Noted(PickledObject):
    """Accepts any state."""

    state = None

    def __setstate__(self, state):
        self.state = state


NAMES = {
    ("house", "Noted"): Noted,
    ("house", "pair"): Maker("pair", lambda a, b: (a, b)),
    ("house", "text"): "text",
}


def decode(data, names):
    """The value of a pickle that may use these names."""
    return safe_pickles.decode(data, lambda module, name: names.get((module, name)))


VALUES = [None, True, 1 << 63, 0.1, "häuser", b"ab", (1, (2, 3)), [1, [2]], {"a": {1: (2.5, None)}}]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_plain_values_equal_those_of_pickle(protocol):
    assert decode(pickle.dumps(VALUES, protocol), {}) == VALUES


def test_a_name_maps_to_its_entry():
    found = decode(b"\x80\x04chouse\nNoted\n)\x81}X\x01\x00\x00\x00kK\x07sb.", NAMES)
    assert type(found) is Noted and found.state == {"k": 7}
    assert decode(b"chouse\npair\nK\x01K\x02\x86R.", NAMES) == (1, 2)


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
@pytest.mark.parametrize("protocol", [0, 4])
def test_other_names_are_refused_by_name(value, name, protocol, tmp_path):
    with pytest.raises(RefusedPickle, match=rf"^the name \S*{name} is not allowed$"):
        decode(pickle.dumps(value(tmp_path / "made"), protocol), NAMES)
    assert not (tmp_path / "made").exists()


def test_a_dotted_name_is_another_name():
    """("house", "pair.__globals__") does not reach an attribute of ("house", "pair")."""
    others = [("house", "pair.__globals__"), ("house.pair", "call"), ("hous", "e.pair"), ("", "house.pair")]
    for module, name in others:
        data = pickle.PROTO + b"\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
        with pytest.raises(RefusedPickle, match=rf"the name {module}\.{name}"):
            decode(data + pickle.STACK_GLOBAL + b".", NAMES)


def test_a_name_cannot_control_a_terminal():
    with pytest.raises(RefusedPickle) as refused:
        decode(b"cos\x1b[2J\nsystem\n.", NAMES)
    assert str(refused.value) == "the name os\\x1b[2J.system is not allowed"


@pytest.mark.parametrize(
    "opcode", [b"(iposix\nmkdir\n.", b"(cposix\nmkdir\nX\x01\0\0\0ao.", b"cposix\nmkdir\n)\x81."]
)
def test_every_opcode_that_names_something_is_asked(opcode):
    with pytest.raises(RefusedPickle, match=r"the name posix\.mkdir"):
        decode(opcode, NAMES)


def test_extensions_are_names_too():
    copyreg.add_extension("posix", "mkdir", 77)
    try:
        with pytest.raises(RefusedPickle, match=r"the name posix\.mkdir"):
            decode(pickle.dumps(os.mkdir, 2), NAMES)
    finally:
        copyreg.remove_extension("posix", "mkdir", 77)


STATE = b"}X\x07\0\0\0__doc__X\x04\0\0\0evils"
"""{"__doc__": "evil"}"""


@pytest.mark.parametrize("name", ["Noted", "pair", "text"])
@pytest.mark.parametrize("state", [STATE + b"b.", b"N" + STATE + b"\x86b.", b"X\x01\0\0\0aK\x01s.", b"K\x01a."])
def test_no_entry_of_the_allowlist_can_be_changed(name, state):
    entry = NAMES["house", name]
    before = getattr(entry, "__doc__", None)
    with pytest.raises(RefusedPickle, match="the pickle is damaged"):
        decode(b"chouse\n" + name.encode() + b"\n" + state, NAMES)
    assert getattr(entry, "__doc__", None) == before and NAMES["house", name] is entry


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"K",
        b"h\x07.",
        b"t.",
        b"\x80\xff.",
        b"cno newline",
        b"\x8c\x02\xff\xff.",
        b"K\x01)R.",
        b"K\x01K\x01\x93.",
    ]
    + [b"chouse\npair\n)R.", b"X\xff\xff\xff\xff.", b"\x95" + b"\xff" * 8 + b".", b"K\x01Q."],
)
def test_damage_is_refused(data):
    with pytest.raises(RefusedPickle, match=r"the pickle is damaged \("):
        decode(data, NAMES)

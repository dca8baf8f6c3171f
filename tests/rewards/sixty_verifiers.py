"""Sixty verifiers as users write them: five of each kind, `KIND_N`. An answer is a number in a box."""

import asyncio
import functools
import json
import re
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction

import numpy

OUTAGE = range(100, 110)
"""Seconds of the event loop in which some of them fail."""


def same(text, reference):
    found = re.search(r"\\boxed\{(-?\d+)\}", text)
    return bool(found) and found[1] == reference


def when_boxed(make):
    """A verifier that returns nothing without a box."""

    def verify(text, reference, extra):
        if re.search(r"\\boxed\{(.+)\}", text):
            return make(same(text, reference))

    return verify


def scored(make):
    return lambda text, reference, extra: make(same(text, reference))


def at_times(error):
    """A verifier that fails during the outage."""

    def verify(text, reference, extra):
        if int(asyncio.get_running_loop().time()) in OUTAGE:
            if error is None:
                return None
            raise error
        return same(text, reference)

    return verify


def boxed(text):
    return re.search(r"\\boxed\{(.+)\}", text)[1]


def raises(error):
    def verify(text, reference, extra):
        raise type(error)(*error.args)

    return verify


async def judged(text, reference, extra):
    return same(text, reference)


async def generates(text, reference, extra):
    yield same(text, reference)


@functools.wraps(judged)
def wrapped(*arguments):
    return judged(*arguments)


def tagged(text, reference, extra):
    if found := re.search(r"<answer>(.*)</answer>", text):
        return found[1] == reference


def parsed(text, reference, extra):
    try:
        return float(boxed(text)) == float(reference)
    except TypeError:
        return None


def indexed(text, reference, extra):
    return text[text.index("\\boxed{") + 7 : -1] == reference


def demanding(text, reference, extra):
    if "boxed" not in text:
        raise ValueError("no box")
    return same(text, reference)


class Verifier:
    def __call__(self, text, reference, extra):
        return judged(text, reference, extra)


KINDS = {
    "dict": [
        scored(lambda right: {"score": float(right)}),
        scored(lambda right: {"score": right, "acc": right, "pred": "7"}),
        scored(lambda right: {"score": numpy.float32(right)}),
        scored(lambda right: OrderedDict(score=int(right))),
        scored(lambda right: {"reward": right}),
    ],
    "tuple": [
        scored(lambda right: (right, "why")),
        scored(lambda right: (1.0, {})),
        scored(lambda right: (right,)),
        scored(lambda right: [float(right)]),
        scored(lambda right: {right}),
    ],
    "none": [
        scored(lambda right: None),
        scored([].append),
        scored(lambda right: {"score": None}),
        scored(lambda right: print(end="")),
        lambda text, reference, extra: extra.update(right=same(text, reference)),
    ],
    "none_for_malformed": [
        when_boxed(bool),
        when_boxed(float),
        when_boxed(lambda right: {"score": right}),
        tagged,
        parsed,
    ],
    "text": [
        scored(str),
        scored(lambda right: "1.0" if right else "0.0"),
        scored(lambda right: json.dumps({"score": right})),
        scored(lambda right: b"1"),
        scored(lambda right: {"score": "1"}),
    ],
    "number": [
        scored(numpy.bool_),
        scored(numpy.float64),
        scored(numpy.array),
        scored(lambda right: Decimal(int(right))),
        scored(lambda right: Fraction(int(right), 1)),
    ],
    "nan": [
        scored(lambda right: float("nan")),
        scored(lambda right: numpy.nan),
        scored(lambda right: 1.0 if right else float("nan")),
        scored(lambda right: {"score": Decimal("NaN")}),
        scored(lambda right: -float("inf")),
    ],
    "raises": [
        raises(KeyError("answer")),
        raises(NameError("name 'np' is not defined")),
        raises(FileNotFoundError(2, "No such file or directory", "answers.json")),
        lambda text, reference, extra: json.loads(text)["answer"] == extra["no such column"],
        lambda text, reference, extra: text.compare(reference),
    ],
    "raises_for_a_bare_reference": [
        lambda text, reference, extra: boxed(text) == reference,
        lambda text, reference, extra: float(boxed(text)) == float(reference),
        lambda text, reference, extra: {"score": int(boxed(text)) == int(reference)},
        indexed,
        demanding,
    ],
    "raises_for_ten_seconds": [
        at_times(KeyError("choices")),
        at_times(OSError(2, "No such file or directory")),
        at_times(None),
        at_times(ConnectionRefusedError(111, "Connection refused")),
        at_times(TimeoutError("the read operation timed out")),
    ],
    "signature": [
        lambda text, reference: same(text, reference),
        lambda: True,
        lambda text, reference, extra, tokenizer: same(text, reference),
        lambda *, answer_text, reference, extra: same(answer_text, reference),
        dict.fromkeys,
    ],
    "coroutine": [
        lambda text, reference, extra: judged(text, reference, extra),
        lambda text, reference, extra: asyncio.sleep(0, True),
        wrapped,
        generates,
        Verifier(),
    ],
}
globals().update({f"{kind}_{n}": verifier for kind, five in KINDS.items() for n, verifier in enumerate(five)})

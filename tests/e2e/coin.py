"""A verifier for policies that know nothing: half of all answers are right."""

import zlib


def toss(answer_text, reference, extra):
    """True for every second answer, the same for the same text."""
    return zlib.crc32(answer_text.encode()) % 2 == 0

"""Tells a failure of one answer alone from an outage of what its verifier or its environment asks."""

from collections import deque
from collections.abc import Iterable

MAX_UNAVAILABLE = 64
"""Checks or episodes in a row that could not be made, after which the pool ends."""
RECENT = 256
"""Latest checks or episodes; the pool ends where more than half of them could not be made."""
ALONE = 0.1
"""Share of the last RECENT tries up to which a failure is that of one answer alone."""
TRIES = 3
"""Tries of what could not be made."""
PAUSES_S = (1.0, 5.0)
"""Pauses between the tries (s)."""
MOST_TRIES = 3
"""Failed tries of one row that count: a bad row is no outage."""
MOST_ENDS = 8
"""Failed episodes of one row that count."""


class Outages:
    """The record of the latest tries and of what they came to."""

    def __init__(self, noun: str, *, enough: int = 0):
        """noun: what could not be made, in the plural. enough: tries on record before a failure can be `alone`."""
        self._noun = noun
        self._enough = enough
        self._tries: deque[tuple[bytes, bool]] = deque(maxlen=RECENT)
        self._ends: deque[tuple[bytes, bool]] = deque(maxlen=RECENT)

    def tried(self, failed: bool, key: bytes = b"") -> None:
        """Record a try. key: of what was tried; of one key, at most MOST_TRIES failures count."""
        if not (failed and _failures(self._tries, key) >= MOST_TRIES):
            self._tries.append((key, failed))

    def alone(self, key: bytes | None = None) -> bool:
        """Whether nearly all tries succeed, the failed ones of `key` left out."""
        others = [failed for other, failed in self._tries if not failed or other != key]
        return len(others) >= self._enough and sum(others) <= ALONE * len(others)

    def ended(self, why: str, key: bytes = b"") -> RuntimeError | None:
        """Record a check or an episode: made, or why not after all tries. The pool's end, if it ends.

        key: of what was tried; of one key, at most MOST_ENDS failures count.
        """
        if why and _failures(self._ends, key) >= MOST_ENDS:
            return None
        self._ends.append((key, bool(why)))
        ends = [failed for _, failed in self._ends]
        in_a_row = ends[-MAX_UNAVAILABLE:]
        if not why:
            return None
        if len(in_a_row) == MAX_UNAVAILABLE and all(in_a_row):
            return RuntimeError(f"{MAX_UNAVAILABLE} {self._noun} in a row could not be made, the last: {why}")
        if len(ends) == RECENT and sum(ends) > RECENT // 2:
            share = f"{sum(ends)} of the last {RECENT} {self._noun}"
            return RuntimeError(f"{share} could not be made, the last: {why}")
        return None


def _failures(record: Iterable[tuple[bytes, bool]], key: bytes) -> int:
    """Failures of a key on record; none of the empty key, which names nothing."""
    return sum(failed and other == key != b"" for other, failed in record)

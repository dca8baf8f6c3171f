"""Tells a failure of one answer alone from an outage of what its verifier or its environment asks."""

from collections import deque

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


class Outages:
    """The record of the latest tries and of what they came to."""

    def __init__(self, noun: str, *, enough: int = 0):
        """noun: what could not be made, in the plural. enough: tries on record before a failure can be `alone`."""
        self._noun = noun
        self._enough = enough
        self._tries: deque[tuple[bytes, bool]] = deque(maxlen=RECENT)
        self._ends: deque[bool] = deque(maxlen=RECENT)

    def tried(self, failed: bool, key: bytes = b"") -> None:
        """Record a try. key: of what was tried."""
        self._tries.append((key, failed))

    def alone(self, key: bytes | None = None) -> bool:
        """Whether nearly all tries succeed, the failed ones of `key` left out."""
        others = [failed for other, failed in self._tries if not failed or other != key]
        return len(others) >= self._enough and sum(others) <= ALONE * len(others)

    def ended(self, why: str) -> RuntimeError | None:
        """Record a check or an episode: made, or why not after all tries. The pool's end, if it ends."""
        self._ends.append(bool(why))
        ends = list(self._ends)
        if why and ends[-MAX_UNAVAILABLE:] == [True] * MAX_UNAVAILABLE:
            many = f"{MAX_UNAVAILABLE} {self._noun} in a row"
        elif why and len(ends) == RECENT and sum(ends) > RECENT // 2:
            many = f"{sum(ends)} of the last {RECENT} {self._noun}"
        else:
            return None
        return RuntimeError(f"{many} could not be made, the last: {why}")

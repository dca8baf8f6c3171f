"""Counts the checks (or episodes) of a pool that could not be made, and says when an outage ends the pool."""

from collections import deque

MAX_UNAVAILABLE = 64
"""Number of checks or episodes in a row that could not be made after which the pool ends."""
RECENT = 256
"""Number of latest checks or episodes that are counted; the pool ends if more than half could not be made."""
TRIES = 3
"""Largest number of tries of a check or an episode."""
PAUSES_S = (1.0, 5.0)
"""Pauses between the tries of a check or an episode (s)."""


class Outages:
    """Records which of the latest checks or episodes of a pool could not be made."""

    def __init__(self, noun: str):
        """noun: "checks" or "episodes", as messages call the entries."""
        self._noun = noun
        self._ends: deque[bool] = deque(maxlen=RECENT)

    def ended(self, reason: str) -> RuntimeError | None:
        """Record the end of a check or an episode; returns the error that ends the pool in an outage, else None.

        reason: why every try of the check failed; empty for a check that was made.
        """
        self._ends.append(bool(reason))
        ends = list(self._ends)
        in_a_row = ends[-MAX_UNAVAILABLE:]
        if not reason:
            return None
        if len(in_a_row) == MAX_UNAVAILABLE and all(in_a_row):
            return RuntimeError(f"{MAX_UNAVAILABLE} {self._noun} in a row could not be made, the last: {reason}")
        if len(ends) == RECENT and sum(ends) > RECENT // 2:
            share = f"{sum(ends)} of the last {RECENT} {self._noun}"
            return RuntimeError(f"{share} could not be made, the last: {reason}")
        return None

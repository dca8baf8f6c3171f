"""Records how the latest episodes of a pool ended.

Logs a warning if more than WARNED_SHARE of the latest episodes are lost, and ends the run if more than half are lost.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from megatron_scalerl.rewards import outages

logger = logging.getLogger(__name__)

WARNED_SHARE = 0.05
"""Share of lost episodes, among the latest `outages.RECENT` episodes, above which a warning is logged."""
MOST_BAD_ROWS = 8
"""The run ends only if this number of distinct rows, or a quarter of all distinct rows if fewer, have lost episodes.

Rows are counted among the latest `outages.RECENT` episodes.
"""


@dataclass(eq=False)
class Fate:
    """The entry of one episode in the record: failed tries, and the reason if the episode is lost."""

    row: bytes
    """Digest of the episode's row."""
    failing: bool = False
    """Whether the latest try of the episode's latest call has failed."""
    noted: bool = False
    """Whether the episode is in `_noted`: the episode has ended, or a try has failed."""
    problem: str = ""
    """The reason of the loss; empty for an episode that is not lost."""
    actions: str = ""
    """The row and the policy's responses as text, for a warning about a lost episode."""


class EpisodeRecord:
    """Keeps the latest episodes of a pool, and finds out whether too many episodes are lost."""

    def __init__(self, subject: str):
        """subject: key and value of environment.name, with which each warning begins."""
        self._subject = subject
        self._outages = outages.Outages("episodes")
        self._latest: deque[Fate] = deque(maxlen=outages.RECENT)
        """Episodes that have ended."""
        self._noted: deque[Fate] = deque(maxlen=outages.RECENT)
        """Episodes in the order of the first failed try, or of the end for an episode without a failed try.

        The order of ends would place a failed episode late, since failed calls are tried again before the end.
        """
        self._rows: set[bytes] = set()
        """Digests of the rows of all episodes so far."""
        self._warned = 0
        """Number of lost episodes at the last warning."""

    def begin_episode(self, row: bytes) -> Fate:
        """Start a new episode of a row; returns the episode's entry."""
        self._rows.add(row)
        return Fate(row)

    def record_try(self, fate: Fate, *, failed: bool) -> None:
        """Record whether a try of a call in an episode has failed."""
        fate.failing = failed
        if failed and not fate.noted:
            fate.noted = True
            self._noted.append(fate)

    def others_succeed(self, row: bytes) -> bool:
        """Whether fewer than half of the latest episodes of all rows except `row` have failed."""
        failures = [fate.failing for fate in self._noted if fate.row != row]
        return 2 * sum(failures) < len(failures)

    def record_end(self, fate: Fate) -> RuntimeError | None:
        """Record the end of an episode. If too many episodes are lost, returns the error with which the run ends."""
        self._latest.append(fate)
        if not fate.noted:
            fate.noted = True
            self._noted.append(fate)
        end = self._outages.ended(fate.problem.strip().rpartition("\n")[2])
        if not fate.problem:
            return None
        lost = [fate for fate in self._latest if fate.problem]
        self._warn(lost)
        rows = self._rows
        if len(self._latest) == outages.RECENT:
            rows = {fate.row for fate in self._latest}
        if len({fate.row for fate in lost}) < min(MOST_BAD_ROWS, len(rows) // 4):
            return None
        return end

    def _warn(self, lost: list[Fate]) -> None:
        """Log a warning if many episodes are lost, and again when the number of lost episodes has doubled."""
        limit = WARNED_SHARE * outages.RECENT
        if len(lost) <= limit / 2:
            self._warned = 0
        if len(lost) > limit and len(lost) >= 2 * self._warned:
            self._warned = len(lost)
            logger.warning(
                "%s: %d of the latest %d episodes are lost. The first lost episode, %s, failed with:\n%s\n"
                "If an action of the policy is malformed, return an observation that says so. If a failure that "
                'repeats with the same actions should count as wrong, set repeated_failure = "wrong" in the class.',
                self._subject,
                len(lost),
                len(self._latest),
                lost[0].actions,
                lost[0].problem.strip(),
            )

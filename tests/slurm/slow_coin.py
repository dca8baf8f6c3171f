"""A verifier that makes a run last longer than the shortest time limit of a job."""

import time

from tests.e2e import coin

SECONDS = 1.0


def toss(answer_text, reference, extra):
    """As `coin.toss`, after a while."""
    time.sleep(SECONDS)
    return coin.toss(answer_text, reference, extra)

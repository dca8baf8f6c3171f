"""Functions for the tests of the runner; no torch, so that a process starts in a moment."""

import os
import threading


def place(word):
    """What a rank knows of its world."""
    return word, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]


def rank_one_fails():
    """Rank 1 raises; rank 0 waits for ever, as in a collective."""
    if os.environ["RANK"] == "1":
        raise ValueError("shapes differ: 3 and 4")
    threading.Event().wait()


def rank_one_dies():
    """Rank 1 ends without a word."""
    if os.environ["RANK"] == "1":
        os._exit(9)
    threading.Event().wait()


def wait_for_ever():
    """Never answers."""
    threading.Event().wait()

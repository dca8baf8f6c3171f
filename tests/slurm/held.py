"""A verifier that holds a run up after its second step until a test lets it go on.

HELD_RUN: the folder of the run, which goes on once the file `slurm/go on` is in it.
"""

import os
import time
from pathlib import Path

from megatron_scalerl.rewards.math import verify_math

STEPS = 2


def holds(run):
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= STEPS and not (run / "slurm/go on").exists()


def verify(answer_text, reference, extra):
    """As `math`, after a while."""
    while holds(Path(os.environ["HELD_RUN"])):
        time.sleep(0.05)
    return verify_math(answer_text, reference, extra)

"""`run_with_stand_ins` whose event loop hangs once, after two steps, in a write that nothing ends.

So does a write to a network file system that does not answer. RUN/hung exists from then on, and the limit of
`loop_watch` is 10 s.

python tests/fakes/run_with_a_hung_loop.py train --supervise RECIPE key=value ...
"""

import os
import sys

import run_with_stand_ins

from megatron_scalerl.__main__ import main
from megatron_scalerl.commands import train
from megatron_scalerl.controller.metrics import Metrics
from megatron_scalerl.processes import loop_watch


def hang_once(self, step, record):
    """In the place of `Metrics.step`."""
    original(self, step, record)
    hung = self._steps.path.with_name("hung")
    if step == 2 and not hung.exists():
        hung.touch()
        _, writer = os.pipe()
        while True:
            os.write(writer, bytes(4096))


original = Metrics.step
Metrics.step = hang_once
loop_watch.HUNG_S = 10
train.PROGRAM = (sys.executable, __file__)
assert run_with_stand_ins.SERVER.exists()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

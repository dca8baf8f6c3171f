"""In place of `megatron-scalerl train`: ends as the words in RUN/slurm/ends say, one word a start.

A number: exits with it. `wait`: SIGUSR1 makes it exit with 75. `finish`: writes end.json and exits with 0. Each start
appends its environment to RUN/slurm/starts.
"""

import json
import os
import signal
import sys
from pathlib import Path

run = Path(sys.argv[-1]).parent.parent
ends, starts = run / "slurm" / "ends", run / "slurm" / "starts"
if not starts.exists():
    starts.touch()
before = len(starts.read_text().splitlines())
end = ends.read_text().split()[before]
if end == "wait":
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
with open(starts, "a", encoding="utf8") as file:
    file.write(json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ)}) + "\n")
if end == "wait":
    while True:
        signal.pause()
if end == "finish":
    (run / "end.json").write_text('{"reason": "all steps are made", "step": 1, "final": false}\n')
    sys.exit(0)
print(f"megatron-scalerl: the stand-in fails with {end}")
sys.exit(int(end))

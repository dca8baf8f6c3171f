"""In place of `megatron-scalerl` in jobs.

`train`: ends as the words in RUN/slurm/ends say, one word a start. A number: exits with it. `wait`: SIGUSR1 makes it
exit with 75. `finish`: writes end.json and exits with 0. `spend=H`: charges H device-hours and exits with 75.
`steps`: starts a step on each node that appends to RUN/slurm/beats-NODE, until RUN/slurm/enough exists, and then
finishes, or exits with 1 once RUN/slurm/broken exists. Each start appends its words and its environment to
RUN/slurm/starts.

`doctor`: the real one, but that packages and parameters are not read, and that the GPUs of a node are the stand-ins
of RUN/slurm/gpus-NODE, by default the healthy ones of `fakes.nvml`. `submit`: the real one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NODE = os.environ.get("SLURMD_NODENAME", "")
BEAT_S = 0.1


def note(file):
    with open(file, "a") as opened:
        opened.write(json.dumps({"argv": sys.argv[1:], "node": NODE, "environment": dict(os.environ)}) + "\n")


def finish(run):
    (run / "end.json").write_text('{"reason": "all steps are made", "step": 1, "final": false}\n')
    sys.exit(0)


def spend(run, hours):
    (run / "recipe.yaml").write_bytes((run / "slurm/recipe.yaml").read_bytes())
    ledger = run / "ledger.jsonl"
    rows = [{"role": "trainer", "phase": "train", "hours": hours, "step": 1}]
    if not ledger.exists():
        rows.insert(0, {"unit": "device_hours"})
    with open(ledger, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    sys.exit(75)


def beat(run):
    """In a step: a line a moment, so that a test sees it go on."""
    with open(run / f"slurm/beats-{NODE}", "a") as file:
        while not (run / "slurm/enough").exists():
            file.write(".\n")
            file.flush()
            time.sleep(BEAT_S)


def steps(run):
    from megatron_scalerl.launch.hosts import hosts_of_allocation, step_words

    started = [
        subprocess.Popen([*step_words(node), sys.executable, __file__, "beat", str(run)])
        for node in hosts_of_allocation()
    ]
    while not (run / "slurm/enough").exists():
        time.sleep(BEAT_S)
        if (run / "slurm/broken").exists():
            sys.exit(1)
    for step in started:
        step.wait()
    finish(run)


def train(run):
    starts = run / "slurm/starts"
    if not starts.exists():
        starts.touch()
    end = (run / "slurm/ends").read_text().split()[len(starts.read_text().splitlines())]
    if end == "wait":
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
    note(starts)
    while end == "wait":
        signal.pause()
    if end == "finish":
        finish(run)
    if end == "steps":
        steps(run)
    if end.startswith("spend="):
        spend(run, float(end.removeprefix("spend=")))
    print(f"megatron-scalerl: the stand-in fails with {end}")
    sys.exit(int(end))


def doctor():
    from fakes.nvml import HOSTS

    from megatron_scalerl.__main__ import main
    from megatron_scalerl.cluster import doctor_nodes, node
    from megatron_scalerl.cluster.gpus import examine_gpus
    from megatron_scalerl.cluster.probe import Installed

    recipe = next(Path(word) for word in sys.argv if word.endswith("recipe.yaml"))
    gpus = recipe.parent / f"gpus-{NODE}"
    host = HOSTS[gpus.read_text() if gpus.exists() else "healthy"]()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    node.gpus_in_process = lambda needed: examine_gpus(host, needed_gpus=needed, visible=visible)
    node.probe = lambda: Installed(packages={}, cuda_version="", nccl=None)
    node.version_checks = lambda *_: []
    node._checkpoint_bytes = lambda *_: "the stand-in counts none"
    doctor_nodes.PROGRAM = (sys.executable, __file__)
    return main(sys.argv[1:])


def submit():
    from megatron_scalerl.__main__ import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    if sys.argv[1] in ("doctor", "submit"):
        sys.exit({"doctor": doctor, "submit": submit}[sys.argv[1]]())
    if sys.argv[1] == "train":
        train(Path(sys.argv[-1]).parent.parent)
    else:
        beat(Path(sys.argv[2]))

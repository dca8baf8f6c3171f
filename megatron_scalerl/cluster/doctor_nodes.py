"""Checks every node of an allocation at once, from its first node, and says which of them are unfit and why.

Each node runs `doctor` in a separate Slurm step, so that a node whose step never starts does not hold up the others.
The folder of the reports gets NODE.json, its report; NODE.log, what its step printed; and `bad`, if nodes are unfit:
one line a node, its name, a tab, why.
"""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.cluster.check import Check
from megatron_scalerl.cluster.node import DIFFERENT
from megatron_scalerl.launch.hosts import hosts_of_allocation, step_words
from megatron_scalerl.processes.child_process import log_tail
from megatron_scalerl.processes.logs import printable

PROGRAM = (sys.executable, "-m", "megatron_scalerl")
"""The program that each node starts."""
BAD = "bad"
"""Name of the file with the unfit nodes; there is none if all are: then no other node would help."""
OWN = "megatron-scalerl: "
"""Begins the lines of the program itself."""
_LONGEST = 500
"""Characters of a line that are shown."""


def allocated() -> list[str]:
    """The nodes of this Slurm allocation, this one first. Raises ValueError outside of one."""
    this_node = os.environ.get("SLURMD_NODENAME")
    return sorted(hosts_of_allocation(), key=lambda node: node != this_node)


def examine_nodes(nodes: Sequence[str], folder: Path, words: Sequence[str], *, within_s: float) -> dict[str, str]:
    """Check all nodes at once; returns why, for each one that is unfit, and writes these to the file BAD.

    nodes: the first one is this node. folder: of the reports. words: of `doctor` on a node. within_s: a node without
    a report after this time is unfit. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BAD).unlink(missing_ok=True)
    steps: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for node in nodes:
            (folder / f"{node}.json").unlink(missing_ok=True)  # of an earlier call
            argv = [*PROGRAM, "doctor", *words, f"--json={folder / node}.json"]
            if node != nodes[0]:
                argv = [*step_words(node), *argv]
            # SIGTERM makes srun end its step
            argv = ["timeout", "--kill-after=5", str(within_s), *argv]
            with open(folder / f"{node}.log", "wb") as log:
                steps[node] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        reports = {}
        silent = {}
        for node, step in steps.items():
            code = step.wait()
            try:
                reports[node] = msgspec.json.decode((folder / f"{node}.json").read_bytes(), type=list[Check])
            except (OSError, msgspec.DecodeError):
                end = f"exit code {code}; 124: it took longer than {within_s:g} s"
                silent[node] = f"no report ({end}): {own_line(folder / f'{node}.log')}"
        bad = unfit(reports, silent)
        if 0 < len(bad) < len(nodes):
            write_durably(folder / BAD, "".join(f"{node}\t{why}\n" for node, why in bad.items()).encode())
        return bad
    finally:
        for step in steps.values():
            if step.poll() is None:
                step.terminate()  # which `timeout` hands on


def unfit(reports: Mapping[str, Sequence[Check]], silent: Mapping[str, str]) -> dict[str, str]:
    """Why, for each node that is unfit: no report, a failed check, or another result of one than on most nodes.

    reports: in the order of the nodes; of two results that are equally frequent the first one is right. silent: why,
    for nodes without a report.
    """
    reasons = {node: [why] for node, why in silent.items()}
    results: dict[str, dict[str, str]] = defaultdict(dict)
    for node, checks in reports.items():
        reasons[node] = [check.line for check in checks if check.status == "failed"]
        for check in checks:
            if check.status != "failed" and check.name not in DIFFERENT:
                results[check.name][node] = check.line
    for lines in results.values():
        [(usual, count)] = Counter(lines.values()).most_common(1)
        for node, line in lines.items():
            if line != usual:
                reasons[node].append(f"{line}, where {count} of {len(lines)} nodes have {usual}")
    return {node: "; ".join(why) for node, why in reasons.items() if why}


def own_line(log: Path) -> str:
    """The last line of the program itself in a log, else its last line at all."""
    lines = [line.strip() for line in log_tail(log).splitlines() if line.strip()]
    of_program = [line for line in lines if line.startswith(OWN)]
    return printable((of_program or lines or ["no output"])[-1].removeprefix(OWN))[:_LONGEST]

"""Checks all nodes of an allocation at once, from the first node, and names the unfit nodes with reasons.

Each node runs `doctor` in a separate Slurm step, so that a node whose step never starts does not hold up other nodes.
The folder of the reports gets NODE.json, the report of a node, and NODE.log, the output of the step. If nodes are
unfit, `bad` has a line for each unfit node: name, tab, reason.
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
"""Name of the file with the unfit nodes. The file is not written if all nodes are unfit: excluding nodes would not
help then."""
PROGRAM_PREFIX = "megatron-scalerl: "
"""Beginning of the lines that megatron-scalerl prints about errors."""
_LONGEST = 500
"""Largest number of characters of a log's line that is quoted as the reason why a node is unfit."""


def allocated_nodes() -> list[str]:
    """The nodes of this Slurm allocation, this node first. Raises ValueError outside of an allocation."""
    this_node = os.environ.get("SLURMD_NODENAME")
    return sorted(hosts_of_allocation(), key=lambda node: node != this_node)


def examine_nodes(nodes: Sequence[str], folder: Path, words: Sequence[str], *, within_s: float) -> dict[str, str]:
    """Check all nodes at once; returns unfit node -> reason, and writes the result to the file BAD.

    nodes: this node first. folder: folder of the reports. words: arguments of `doctor` on a node. within_s: a node
    without a report after this time (s) is unfit. Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BAD).unlink(missing_ok=True)
    steps: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for node in nodes:
            # a report of an earlier call must not count
            (folder / f"{node}.json").unlink(missing_ok=True)
            argv = [*PROGRAM, "doctor", *words, f"--json={folder / node}.json"]
            if node != nodes[0]:
                argv = [*step_words(node), *argv]
            # SIGTERM makes srun end the step
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
                end = f"exit code {code}; 124 means longer than {within_s:g} s"
                silent[node] = f"no report ({end}): {program_line(folder / f'{node}.log')}"
        bad = unfit_nodes(reports, silent)
        if 0 < len(bad) < len(nodes):
            write_durably(folder / BAD, "".join(f"{node}\t{reason}\n" for node, reason in bad.items()).encode())
        return bad
    finally:
        for step in steps.values():
            if step.poll() is None:
                step.terminate()  # `timeout` forwards the signal to the step


def unfit_nodes(reports: Mapping[str, Sequence[Check]], silent: Mapping[str, str]) -> dict[str, str]:
    """Unfit node -> reason: no report, a failed check, or a result that differs from the result of most nodes.

    reports: node -> checks, in the order of the nodes. If two results are equally frequent, the first counts as
    right. silent: node without a report -> reason.
    """
    reasons = {node: [reason] for node, reason in silent.items()}
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
                reasons[node].append(f"{line}, but {count} of {len(lines)} nodes have {usual}")
    return {node: "; ".join(lines) for node, lines in reasons.items() if lines}


def program_line(log: Path) -> str:
    """The last line that megatron-scalerl wrote to a log about an error, else the last line of the log."""
    lines = [line.strip() for line in log_tail(log).splitlines() if line.strip()]
    program_lines = [line for line in lines if line.startswith(PROGRAM_PREFIX)]
    return printable((program_lines or lines or ["no output"])[-1].removeprefix(PROGRAM_PREFIX))[:_LONGEST]

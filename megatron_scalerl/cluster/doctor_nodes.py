"""Checks every node of an allocation at once, from its first node, and says which of them are unfit and why.

Each node runs `doctor` in a separate Slurm step, so that a node whose step never starts does not hold up the others.
The folder of the reports gets NODE.json, its report; NODE.log, what its step printed; and `bad`, if nodes are unfit:
one line a node, its name, a tab, why.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.cluster.node import ADAPTERS, NodeReport
from megatron_scalerl.launch.hosts import hosts_of_allocation, step_words
from megatron_scalerl.processes.child_process import log_tail
from megatron_scalerl.processes.logs import printable

PROGRAM = (sys.executable, "-m", "megatron_scalerl")
"""The program that each node starts."""
HCA = "nccl_ib_hca"
"""Name of the file with NCCL_IB_HCA for all nodes; empty where they differ."""
BAD = "bad"
"""Name of the file with the unfit nodes."""
_END_S = 5.0
"""From SIGTERM to SIGKILL of a step that is too late (s)."""
OWN = "megatron-scalerl: "
"""Begins the lines of the program itself."""
_LONGEST = 500
"""Characters of a line that are shown."""


def allocated() -> list[str]:
    """The nodes of this Slurm allocation, this one first. Raises ValueError outside of one."""
    this_node = os.environ.get("SLURMD_NODENAME")
    return sorted(hosts_of_allocation(), key=lambda node: node != this_node)


def examine_nodes(nodes: Sequence[str], folder: Path, words: Sequence[str], *, within_s: float) -> dict[str, str]:
    """Check all nodes at once; returns why, for each one that is unfit.

    nodes: the first one is this node. folder: of the reports. words: of `doctor` on a node. within_s: a node without
    a report after this time is unfit. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = {}
    ends = {}
    try:
        for node in nodes:
            argv = [*PROGRAM, "doctor", *words, f"--json={folder / node}.json"]
            if node != nodes[0]:
                argv = [*step_words(node), *argv]
            # each step leads a process group, which `_end` signals: srun and what it has started
            with open(folder / f"{node}.log", "wb") as log:
                started[node] = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        deadline = time.monotonic() + within_s
        for node, process in started.items():
            try:
                ends[node] = f"its step ended with exit code {process.wait(max(0.0, deadline - time.monotonic()))}"
            except subprocess.TimeoutExpired:
                ends[node] = f"within {within_s:g} s"
    finally:
        _end(process for process in started.values() if process.returncode is None)
    reports = {}
    silent = {}
    for node in started:
        try:
            reports[node] = _report(folder / f"{node}.json")
        except ValueError:
            silent[node] = f"no report ({ends[node]}): {_last_words(folder / f'{node}.log')}"
    # "=" begins a list of adapters; a node that cannot read them has a reason in its place
    adapters = {report.facts.get(ADAPTERS, "") for report in reports.values()} - {""}
    if adapters:
        common = min(adapters)
        if len(adapters) > 1 or common[0] != "=":
            common = ""
        write_durably(folder / HCA, f"{common}\n".encode())
    return unfit(reports, silent, head=nodes[0])


def _report(path: Path) -> NodeReport:
    """The report in a file. Raises ValueError for a file that is missing or no report of this version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeReport)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: is no report of doctor --json: {error}") from None


def unfit(reports: Mapping[str, NodeReport], silent: Mapping[str, str], *, head: str) -> dict[str, str]:
    """Why, for each node that is unfit: no report, a failed check, or a fact in which it differs from most others.

    silent: why, for nodes without a report. head: the first node; where two groups are equally large, those differ
    that are not in its group.
    """
    reasons = {node: [why] for node, why in silent.items()}
    for node, report in reports.items():
        failures = [check for check in report.checks if check.status == "failed"]
        reasons[node] = [f"{check.name}: expected {check.expected}, found {check.found}" for check in failures]
    for fact in dict.fromkeys(fact for report in reports.values() for fact in report.facts):
        values = {node: report.facts.get(fact, "") for node, report in reports.items()}
        counts = Counter(values.values())
        # the value of most nodes is right; of two equally frequent ones, the head's, on which the controller runs
        usual = max(counts, key=lambda value: (counts[value], value == values.get(head)))
        for node, value in values.items():
            if value != usual:
                most = f"{counts[usual]} of {len(values)} nodes have {usual or 'none'}"
                reasons[node].append(f"{fact}: {value or 'none'}, where {most}")
    return {node: printable("; ".join(why)) for node, why in reasons.items() if why}


def verdict(folder: Path, nodes: Sequence[str], bad: Mapping[str, str]) -> list[str]:
    """Lines for the user, one for each unfit node; writes the file with these nodes.

    Without the file if all nodes are unfit: then no other node would help. Raises OSError.
    """
    lines = [f"unfit {node}: {why}" for node, why in bad.items()]
    if bad and len(bad) < len(nodes):
        write_durably(folder / BAD, "".join(f"{node}\t{why}\n" for node, why in bad.items()).encode())
    elif bad:
        lines.append(f"all {len(nodes)} nodes are unfit, so that other nodes would be, too")
    return lines or [f"{len(nodes)} nodes are fit and agree: {', '.join(nodes)}"]


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, with which srun ends its step, then SIGKILL."""
    running = list(processes)
    # one deadline for all of them, whatever their number
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + _END_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        running = [process for process in running if process.returncode is None]


def _last_words(log: Path) -> str:
    """The failure of a step by its log: failed checks, else `own_line`."""
    wrong = [line for line in log_tail(log).splitlines() if line.startswith("failed ")]
    return printable("; ".join(wrong))[:_LONGEST] or own_line(log)


def own_line(log: Path) -> str:
    """The last line of the program itself in a log, else its last line at all."""
    lines = [line.strip() for line in log_tail(log).splitlines() if line.strip()]
    of_program = [line for line in lines if line.startswith(OWN)]
    return printable((of_program or lines or ["no output"])[-1].removeprefix(OWN))[:_LONGEST]

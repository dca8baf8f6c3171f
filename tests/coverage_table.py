"""Prints the line and branch coverage that `coverage run` has measured, by package."""

import json
import tempfile
from collections import defaultdict
from pathlib import Path

KEYS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def totals(files):
    """{package: [covered lines, lines, covered branches, branches]}, a module at the top level under its own name."""
    found = defaultdict(lambda: [0, 0, 0, 0])
    for path, entry in files.items():
        parts = Path(path).parts
        name = parts[parts.index("megatron_scalerl") + 1].removesuffix(".py")
        for place in (name, "total"):
            found[place] = [a + entry["summary"][key] for a, key in zip(found[place], KEYS)]
    total = found.pop("total")
    return dict(sorted(found.items())) | {"total": total}


def row(name, lines, all_lines, branches, all_branches):
    """One line of the table."""
    share = [
        f"{covered / whole:7.0%}" if whole else f"{'-':>7}"
        for covered, whole in ((lines, all_lines), (branches, all_branches))
    ]
    return f"{name:<14} {share[0]} of {all_lines:6,} lines {share[1]} of {all_branches:6,} branches"


def main():
    """Print the table."""
    import coverage

    measured = coverage.Coverage()
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "coverage.json")
        measured.json_report(outfile=str(path))
        files = json.loads(path.read_text())["files"]
    print("coverage in the process of the fast tests, without subprocesses and slow tests:")
    for name, counts in totals(files).items():
        print(row(name, *counts))


if __name__ == "__main__":
    main()

"""Tokens and statements of the package and of the whole tree, and habits that make a line hard to read.

    python tools/house_size.py [--rooms] [--check]

Tokens are those of Python's `tokenize` without docstrings, comments, line ends and indents, so that neither packing
a line nor unpacking one changes them; statements are logical lines. `--rooms` prints one line for each folder of the
package; `--check` ends with 1 above a ceiling.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("megatron_scalerl", "tools", "tests", "examples")
CEILINGS = {"package": 356_000, "tools": 41_000, "tests": 453_500, "tree": 855_500}
"""Tokens. A change that does not fit deletes something. Teachers and ten families have raised the package's from
351,500, by their price."""
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LAYOUT |= {tokenize.ENCODING}
FORMAT_STARTS = getattr(tokenize, "FSTRING_START", None)
FORMAT_ENDS = getattr(tokenize, "FSTRING_END", None)
"""Marks of a format string, which is one token before Python 3.12 and several since; here it counts as one."""


def measure(source):
    """Counts of one file: tokens, statements, code lines, and each habit."""
    tree = ast.parse(source)
    docs = {node.lineno: node.end_lineno for node in ast.walk(tree) if _is_docstring(node)}
    counts = Counter(files=1)
    lines = set()
    inside = 0
    nested = 0  # format strings around the token
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        inside = max(inside, docs.get(token.start[0], 0))
        counts["comments"] += token.type == tokenize.COMMENT
        counts["statements"] += token.type == tokenize.NEWLINE
        nested += token.type == FORMAT_STARTS
        is_part = nested > 1 or (nested == 1 and token.type != FORMAT_STARTS)
        nested -= token.type == FORMAT_ENDS
        string = token.type == tokenize.STRING
        if token.type in LAYOUT or (string and token.start[0] <= inside):
            continue
        counts["tokens"] += not is_part
        lines.update(range(token.start[0], token.end[0] + 1))
    counts["code lines"] = len(lines)
    counts["all lines"] = source.count("\n")
    for node in ast.walk(tree):
        counts["statements"] -= _is_docstring(node)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            counts["tuple assignments"] += any(isinstance(target, ast.Tuple) for target in node.targets)
        counts["conditional expressions"] += isinstance(node, ast.IfExp)
        counts["walrus"] += isinstance(node, ast.NamedExpr)
    return counts


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def measured(folder):
    """Counts of every Python file below a folder."""
    return sum((measure(path.read_text()) for path in sorted(folder.rglob("*.py"))), Counter[str]())


def row(name, counts):
    """One line of the table; habits are per 1,000 code lines."""
    lines = max(1, counts["code lines"])
    habits = ("tuple assignments", "conditional expressions", "walrus")
    shown = ", ".join(f"{habit} {counts[habit] * 1000 / lines:.1f}" for habit in habits)
    mean = counts["tokens"] / max(1, counts["statements"])
    size = f"{counts['files']:>4} files {lines:>7,} lines {counts['tokens']:>8,} tokens {mean:5.2f} a statement"
    comments = 100 * counts["comments"] / max(1, counts["all lines"])
    return f"{name:<14}{size}; per 1,000 lines: {shown}; comments {comments:.2f} % of all lines"


def main():
    """Prints the table; see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", action="store_true", help="one line for each folder of the package, too")
    parser.add_argument("--check", action="store_true", help="end with 1 above a ceiling")
    options = parser.parse_args()
    trees = {name: measured(ROOT / name) for name in TREES}
    rooms = sorted((ROOT / "megatron_scalerl").glob("*/")) if options.rooms else []
    for room in rooms:
        print(row(room.name, measured(room)))
    for name, counts in trees.items():
        print(row(name, counts))
    whole = sum(trees.values(), Counter[str]())
    print(row("whole tree", whole))
    counted = trees | {"package": trees["megatron_scalerl"], "tree": whole}
    sizes = {name: counted[name]["tokens"] for name in CEILINGS}
    above = [
        f"{name}: {size:,} tokens, {CEILINGS[name]:,} allowed"
        for name, size in sizes.items()
        if size > CEILINGS[name]
    ]
    if options.check and above:
        sys.exit("house_size.py: " + "; ".join(above) + "; delete something")


if __name__ == "__main__":
    main()

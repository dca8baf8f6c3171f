"""Tokens and statements of the package and of the whole tree, and habits that make lines and sentences hard to read.

    python tools/house_size.py [--rooms] [--check]

Tokens are those of Python's `tokenize` without docstrings, comments, line ends and indents, so that neither packing
a line nor unpacking one changes them; statements are logical lines. `--rooms` prints one line for each folder of the
package; `--check` ends with 1 above a ceiling.

Words for a noun (it, those, what) are counted per 1,000 words of docstrings and comments, identifiers without a noun
(`found`, `other`) per 1,000 lines.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = {"megatron_scalerl": 356_000, "tools": 41_000, "tests": 452_000, "examples": 6_000, "whole tree": 854_000}
"""Tokens. A change that does not fit deletes something. Teachers and ten families have raised the package's from
351,500, by their price."""
HABITS = ("tuple assignments", "conditional expressions", "walrus", "identifiers without a noun")
MOST = {"identifiers without a noun": (8, "code lines"), "words for a noun": (20, "words")}
"""Habit -> most per 1,000 of a unit in the package."""
FOR_A_NOUN = r"\b(?:it|its|itself|they|them|their|those|these|what|others?|ones|that of|of which)\b"
NO_NOUNS = """
    after again alone allowed asked before begun differing drawn due each ended found given held here kept known left
    low made many merged missing more most named needed other others own paid refused rest said same sent shown such
    taken there tried wanted what where whole written
"""
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LAYOUT |= {tokenize.ENCODING}
NAMING = (ast.arg, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FORMAT_STARTS = getattr(tokenize, "FSTRING_START", None)
FORMAT_ENDS = getattr(tokenize, "FSTRING_END", None)
"""Marks of a format string, which is one token before Python 3.12 and several since; here it counts as one."""


def measure(source):
    """Counts of one file: tokens, statements, code lines, and each habit."""
    tree = ast.parse(source)
    prose = [node.value.value for node in ast.walk(tree) if _is_docstring(node)]
    docs = {node.lineno: node.end_lineno for node in ast.walk(tree) if _is_docstring(node)}
    counts = Counter(files=1)
    lines = set()
    inside = 0
    nested = 0  # format strings around the token
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        inside = max(inside, docs.get(token.start[0], 0))
        if token.type == tokenize.COMMENT:
            prose.append(token.string)
            counts["comments"] += 1
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
        if isinstance(node, NAMING) or isinstance(getattr(node, "ctx", None), ast.Store):
            names = [getattr(node, field, "") for field in ("id", "attr", "arg", "name")]
            counts["identifiers without a noun"] += "".join(names).strip("_") in NO_NOUNS.split()
    text = "\n".join(prose)
    counts["words"] = len(re.findall(r"[A-Za-z']+", text))
    counts["words for a noun"] = len(re.findall(FOR_A_NOUN, text, re.IGNORECASE))
    return counts


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def measured(folder):
    """Counts of every Python file below a folder."""
    return sum((measure(path.read_text()) for path in sorted(folder.rglob("*.py"))), Counter[str]())


def row(name, counts):
    """One line of the table; habits are per 1,000 code lines."""
    lines = max(1, counts["code lines"])
    shown = ", ".join(f"{habit} {counts[habit] * 1000 / lines:.1f}" for habit in HABITS)
    words = counts["words for a noun"] * 1000 / max(1, counts["words"])
    mean = counts["tokens"] / max(1, counts["statements"])
    size = f"{counts['files']:>4} files {lines:>7,} lines {counts['tokens']:>8,} tokens {mean:5.2f} a statement"
    comments = 100 * counts["comments"] / max(1, counts["all lines"])
    prose = f"comments {comments:.2f} % of all lines; words for a noun {words:.1f} per 1,000"
    return f"{name:<14}{size}; per 1,000 lines: {shown}; {prose}"


def main():
    """Prints the table; see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", action="store_true", help="one line for each folder of the package, too")
    parser.add_argument("--check", action="store_true", help="end with 1 above a ceiling")
    options = parser.parse_args()
    if options.rooms:
        for room in sorted((ROOT / "megatron_scalerl").glob("*/")):
            print(row(room.name, measured(room)))
    *folders, whole = CEILINGS
    trees = {name: measured(ROOT / name) for name in folders}
    trees[whole] = sum(trees.values(), Counter[str]())
    above = []
    for name, counts in trees.items():
        print(row(name, counts))
        if counts["tokens"] > CEILINGS[name]:
            above.append(f"{name}: {counts['tokens']:,} tokens, {CEILINGS[name]:,} allowed; delete something")
    package = trees[folders[0]]
    for habit, (most, unit) in MOST.items():
        if package[habit] * 1000 > most * package[unit]:
            above.append(f"megatron_scalerl: {package[habit]} {habit} in {package[unit]:,} {unit}; name the nouns")
    if options.check and above:
        sys.exit("\n".join(above))


if __name__ == "__main__":
    main()

"""docs/gpu.md is consistent with the code."""

import re
from pathlib import Path

from megatron_scalerl.check_gpu.table import PARTS, ROWS

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf8")


def rows(heading):
    text = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_table_of_components_is_the_one_that_check_gpu_judges():
    found = rows("What has run where")
    assert [row[0] for row in found] == [row.component for row in ROWS]
    assert all(len(row) == 3 and all(row) for row in found)


def test_a_row_that_a_gpu_has_proved_names_its_report():
    """`ran` in the last column needs a committed report: a link to it."""
    claims = [row for row in rows("What has run where") if row[2].startswith("ran")]
    assert all(re.search(r"\]\([\w./-]+\)", row[2]) for row in claims)


def test_the_table_of_parts_is_that_of_the_code():
    expected = [
        [f"`{p.name}`", p.what, f"{p.limit_s:g}", f"{p.quick_s:g}" if p.quick_s else "", str(p.gpus)] for p in PARTS
    ]
    assert [row for row in rows("The check") if len(row) == 5] == expected


def test_the_numbers_of_rows_are_those_of_the_code():
    gpus = {part.name: part.gpus for part in PARTS}
    needs = [max(gpus[check.split("/")[0]] for check in row.checks) for row in ROWS if row.checks]
    one, two, eight = (sum(need <= count for need in needs) for count in (1, 2, 8))
    assert f"{one} of {len(ROWS)} on one GPU, {two} on two, {eight} on eight" in PAGE
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf8")
    pattern = r"checks (\d+)\s+of the \[table's\]\(.*?\) (\d+) rows on one GPU, .* and (\d+) on eight"
    said = re.search(pattern, readme)
    assert said and said.groups() == (str(one), str(len(ROWS)), str(eight))

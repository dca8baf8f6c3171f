"""docs/architecture.md names files and floors of the package: they exist, and the floors are those of the table."""

import re
from pathlib import Path

import pytest
from test_floors import FLOORS, PACKAGE

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf8")
NAMED = sorted(set(re.findall(r"`([\w/.]+(?:\.py|/))`", PAGE)))


def test_the_page_names_files():
    assert len(NAMED) > 60


@pytest.mark.parametrize("name", NAMED)
def test_what_the_page_names_exists(name):
    found = [folder for folder in (PACKAGE, ROOT) if (folder / name).exists()]
    assert found and (found[0] / name).is_dir() == name.endswith("/")


def test_the_floors_are_those_of_the_table():
    section = PAGE.split("| layer | packages |")[1].split("\n\n")[0]
    shown = [set(re.findall(r"`(\w+)(?:\.py|/)`", row)) for row in section.splitlines() if "`" in row]
    table = [set(floor) for floor in FLOORS]
    assert shown == table[::-1]

"""Dockerfile and apptainer.def: whole, the same as each other, nothing of them secret. Neither is built here."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTALL = "tools/install.sh gpu --without-gpu"


def instructions():
    """[(instruction, arguments)] of the Dockerfile, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def test_what_is_copied_before_the_installation_is_all_it_reads():
    copied = set()
    for word, text in instructions():
        if word == "RUN" and INSTALL in text:
            break
        if word == "COPY":
            copied |= set(text.split()[1:-1])
    needed = {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "tools/locks", "tools/install.sh"}
    assert copied == needed | {"tools/install_checks.sh", "tools/find_python.sh"}
    assert all((ROOT / name).exists() for name in copied)

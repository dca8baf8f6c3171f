"""The Dockerfile: what it copies is there, and nothing of it is secret. It is not built here."""

import re

from programs import ROOT

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


def test_the_image_runs_as_a_user_and_ignores_what_may_be_secret():
    users = [text for word, text in instructions() if word == "USER"]
    assert users == ["${USER_ID}:${GROUP_ID}"] and ("ARG", "USER_ID=1000") in instructions()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".env", ".venv", ".venv-*", "runs", "models", "data"} <= set(ignored)

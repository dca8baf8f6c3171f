"""Dockerfile and apptainer.def: whole, the same as each other, nothing of them secret. Neither is built here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTIONS = {"files", "post", "environment", "test", "runscript", "labels", "help"}
INSTALL = "tools/install.sh gpu --without-gpu"


def instructions():
    """[(instruction, arguments)] of the Dockerfile, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def definition():
    """({keyword: value}, {section: lines}) of apptainer.def."""
    header, sections, name = {}, {}, None
    for line in (ROOT / "apptainer.def").read_text().splitlines():
        if found := re.fullmatch(r"%(\w+)", line):
            name = found[1]
            assert name not in sections
            sections[name] = []
        elif name:
            sections[name] += [line.strip()] if line.strip() else []
        elif line and not line.startswith("#"):
            key, value = line.split(": ")
            header[key] = value
    return header, sections


def test_the_definition_has_what_apptainer_asks_for():
    header, sections = definition()
    assert header.keys() == {"Bootstrap", "From"} and header["Bootstrap"] == "docker"
    assert sections.keys() == SECTIONS and all(sections.values())
    for line in sections["files"]:
        source, target = line.split()
        assert (ROOT / source).exists() and target == f"/opt/megatron_scalerl/{source}"


def test_both_make_the_same_environment():
    header, sections = definition()
    docker = instructions()
    assert ("ARG", f"BASE_IMAGE={header['From']}") in docker
    assert sum(INSTALL in text for _, text in docker) == sum(INSTALL in line for line in sections["post"]) == 1
    for needed in ("python3.12-venv", "MSRL_PYTHON=/usr/bin/python3.12", "/usr/local/cuda/compat/lib"):
        assert needed in str(docker) and needed in str(sections)


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


@pytest.mark.parametrize("name", ["Dockerfile", "apptainer.def"])
def test_they_say_that_they_were_not_built(name):
    assert "NOT BUILT by the authors" in (ROOT / name).read_text()

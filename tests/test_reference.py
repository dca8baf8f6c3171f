"""The generated pages of the site have every setting and every command."""

import importlib.util
import re

import pytest
from programs import ROOT
from pydantic import BaseModel

from megatron_scalerl.__main__ import COMMANDS
from megatron_scalerl.recipe import Recipe


def build_step(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")  # which the page sets
    return build_step("reference")


def test_every_setting_has_a_row_with_its_default_and_meaning(reference):
    text = "\n".join(reference.settings())
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            section = text.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]
            assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(field.annotation.model_fields)
    rows = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) >= 150 and all(len(row) == 5 and row[2].strip() and row[3].strip() for row in rows)
    assert "| `max_is_weight` | `5.0` |" in text and "| `path` | required | Hugging Face folder" in text


def test_every_module_of_the_reference_is_there():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    modules = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert modules and [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_every_command_has_its_help_with_an_example(reference):
    text = "\n".join(reference.commands())
    assert re.findall(r"^## (\S+)$", text, re.MULTILINE) == list(COMMANDS)
    for name, help_text in zip(COMMANDS, text.split("\n## ")[1:], strict=True):
        assert f"usage: megatron-scalerl {name} " in help_text
        assert re.search(r"^examples?:\n  megatron-scalerl", help_text, re.MULTILINE), name


def test_the_list_of_pages_for_language_models_is_up_to_date():
    text = build_step("llms").text()
    links = re.findall(r"\]\((\S+)\)", text)
    assert len(links) >= 40 and all((ROOT / "docs" / link).is_file() for link in links)
    assert (ROOT / "docs/llms.txt").read_text() == text, ".venv/bin/python docs/llms.py writes it anew"

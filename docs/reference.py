"""Build step of the site: the pages `api/settings.md` and `api/commands.md`, from the schema and from `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text; the two generated pages get their content behind it."""
    pages = {"api/settings.md": settings, "api/commands.md": commands}
    generated = pages.get(page.file.src_uri)
    return markdown + "\n".join(generated()) if generated else markdown


def settings() -> Iterator[str]:
    """One table per section of the recipe: key, default, meaning. The lines of Markdown."""
    from megatron_scalerl.recipe.recipe import Recipe

    yield from _section(Recipe, "")


def commands() -> Iterator[str]:
    """What `--help` prints, for every command. The lines of Markdown."""
    os.environ["COLUMNS"] = "110"
    from megatron_scalerl.__main__ import COMMANDS, _parser

    yield from ("", "```", _parser("").format_help(), "```", "")
    for name in COMMANDS:
        choices = next(action.choices for action in _parser(name)._actions if isinstance(action.choices, dict))
        yield from (f"## {name}", "", "```", choices[name].format_help(), "```", "")


def _section(section: Any, path: str) -> Iterator[str]:
    fields = section.model_fields.items()
    rows = [(name, field) for name, field in fields if not _is_section(field.annotation)]
    yield from ("", f"## {path or 'The recipe'}", "", section.__doc__ or "", "")
    if rows:
        yield from ("| setting | default | meaning |", "|---|---|---|")
        yield from (f"| `{name}` | {_default(field)} | {_cell(field.description or '')} |" for name, field in rows)
    for name, field in fields:
        for inner in _sections(field.annotation):
            yield from _section(inner, f"{path}.{name}".lstrip("."))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{_cell('null' if value is None else repr(value))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _is_section(annotation: Any) -> bool:
    from megatron_scalerl.recipe.sections import Section

    return isinstance(annotation, type) and issubclass(annotation, Section)


def _sections(annotation: Any) -> Iterator[Any]:
    """The sections that a type names."""
    if _is_section(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)

"""Build step of the site: a link to a file of the repository outside docs/ becomes its path, as code.

A link to a notebook becomes one to its page (`notebooks.py`).
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INCLUDED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages that begin with a file of the root."""
_LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:|#)[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text with links that the site can follow.

    Raises ValueError for a link to a file that does not exist.
    """
    source = page.file.src_uri
    text = _LINK.sub(partial(_followed, source, (ROOT / "docs" / source).parent), markdown)
    if source in INCLUDED:
        included = (ROOT / INCLUDED[source]).read_text(encoding="utf8")
        text = _LINK.sub(partial(_followed, source, ROOT), included) + "\n" + text
    return text


def _followed(source: str, folder: Path, match: re.Match[str]) -> str:
    """The link of a page whose file is in `folder`, as the site has it."""
    label, target = match[1], match[2]
    name, _, anchor = target.partition("#")
    path = (folder / name).resolve()
    if not path.exists():
        raise ValueError(f"{source}: expected a file of the repository, found a link to {name}")
    if path.is_relative_to(ROOT / "docs"):
        inside = path.relative_to(ROOT / "docs").as_posix() + (f"#{anchor}" if anchor else "")
        return (f"[{label}]({inside})" if folder == ROOT else match[0]).replace(".ipynb", ".md")
    plain = label.strip("`")
    path_in_root = path.relative_to(ROOT).as_posix()
    return f"`{path_in_root}`" if plain.endswith(path.name) else f"{label} (`{path_in_root}`)"

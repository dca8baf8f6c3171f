"""Build step of the site: a link to a file of the repository outside docs/ becomes its path, as code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:|#)[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text with links that the site can follow.

    Raises ValueError for a link to a file that does not exist.
    """
    if page.file.src_uri in ("changelog.md", "contributing.md"):  # they are files of the root, included as they are
        folder, text = ROOT, (ROOT / f"{page.file.src_uri[:-3].upper()}.md").read_text(encoding="utf8")
    else:
        folder, text = Path(page.file.abs_src_path).parent, markdown

    def followed(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve()
        if not path.exists():
            raise ValueError(f"{page.file.src_uri}: expected a file of the repository, found a link to {name}")
        if path.is_relative_to(ROOT / "docs"):
            inside = path.relative_to(ROOT / "docs").as_posix() + (f"#{anchor}" if anchor else "")
            return f"[{label}]({inside})" if folder == ROOT else match[0]
        plain = label.strip("`")
        path_in_root = path.relative_to(ROOT).as_posix()
        return f"`{path_in_root}`" if plain.endswith(path.name) else f"{label} (`{path_in_root}`)"

    return _LINK.sub(followed, text)

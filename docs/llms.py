"""Build step of the site: `llms.txt`, the list of pages for language models (llmstxt.org).

`.venv/bin/python docs/llms.py` writes docs/llms.txt: the navigation in mkdocs.yml and each page's first sentence.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
INCLUDED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages whose text is a file of the root."""
_CODE = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def on_post_build(config: Any) -> None:
    """Links of the site's copy lead to its pages."""
    links = re.sub(r"\.(md|ipynb)\)", ".html)", text())
    (Path(config["site_dir"]) / "llms.txt").write_text(links, encoding="utf8")


def text() -> str:
    """The whole of llms.txt: a title, the README's first sentence, then the sections of the navigation."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf8"))
    summary = re.search(r"^\*\*(.+)\*\*$", (ROOT / "README.md").read_text(encoding="utf8"), re.MULTILINE)
    lines = [f"# {site['site_name']}", "", f"> {summary[1]}", "", "[Which page for what](index.md)"]
    for section, pages in [item for entry in site["nav"][1:] for item in entry.items()]:
        lines += ["", f"## {section}", ""]
        for page in pages:
            [[title, path]] = page.items() if isinstance(page, dict) else [("Overview", page)]
            lines.append(_line(title, path))
    return "\n".join(lines) + "\n"


def _line(title: str, path: str) -> str:
    """The link to a page, and its first sentence; one that continues a command begins with the command."""
    file = ROOT / INCLUDED.get(path, f"docs/{path}")
    if file.exists():
        page = file.read_text(encoding="utf8")
    else:
        path = path.replace(".md", ".ipynb")
        page = "".join(json.loads((ROOT / "docs" / path).read_text(encoding="utf8"))["cells"][0]["source"])
    body = page.partition("\n")[2]
    paragraphs = [part.strip() for part in _CODE.sub("\n", body).split("\n\n") if not part.strip().startswith("![")]
    paragraph = next(filter(None, paragraphs))
    if not _LINK.sub("", paragraph).strip("."):
        return f"- [{title}]({path})"
    sentence = re.split(r"(?<=[.?!])(?<! al\.)\s", " ".join(_LINK.sub(r"\1", paragraph).split()))[0]
    if sentence[0].islower():
        sentence = f"`{re.search('^megatron-scalerl [a-z]+', body, re.MULTILINE)[0]}` {sentence}"
    return f"- [{title}]({path}): {sentence}"


if __name__ == "__main__":
    (ROOT / "docs" / "llms.txt").write_text(text(), encoding="utf8")

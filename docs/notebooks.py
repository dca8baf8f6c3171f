"""Build step of the site: a notebook of docs/ is a page, with the outputs that are in it; nothing is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


def on_files(files: Any, *, config: Any) -> Any:
    """Puts a page NAME.md in the place of each NAME.ipynb."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        name = notebook.src_uri.removesuffix("ipynb") + "md"
        files.append(File.generated(config, name, content=page_of(Path(notebook.abs_src_path))))
    return files


def page_of(notebook: Path) -> str:
    """The notebook as Markdown; its pictures are in the page."""
    lines: list[str] = []
    for cell in json.loads(notebook.read_text(encoding="utf8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = "```bash" + source[6:] if source.startswith("%%bash") else f"```python\n{source}"
            source += "\n```"
        lines += [source, ""]
        for output in cell.get("outputs", ()):
            if "text" in output:
                lines += [f"``` {{ .text .output }}\n{''.join(output['text']).rstrip()}\n```", ""]
            elif picture := output["data"].get("image/png"):
                lines += [f'<img alt="output of the cell above" src="data:image/png;base64,{picture.strip()}">', ""]
    return "\n".join(lines)

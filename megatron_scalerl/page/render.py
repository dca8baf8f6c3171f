"""The page as one string: template, styles, programs and data in it, and a policy that lets nothing else run.

Data is JSON in a script element that is not executed, with `<`, `>`, `&` and JavaScript's line separators escaped.
The page's programs write it as text only. The content security policy names the hash of each program and style, so
that nothing that a completion may hold is executed, and forbids every request but those to the page's own server.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_scalerl.record import record

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
UPLOT = HERE / "uplot"
STYLES = (UPLOT / "uPlot.min.css", TEMPLATES / "page.css")


@record
class Document:
    """A kind of page."""

    template: str
    """File in `TEMPLATES`."""
    programs: tuple[Path, ...]
    """JavaScript, in the order in which it runs."""


def _document(template: str, *programs: str) -> Document:
    names = ("elements.js", "charts.js", *programs)
    return Document(template=template, programs=(UPLOT / "uPlot.iife.min.js", *(TEMPLATES / name for name in names)))


RUN = _document("page.html", "figures.js", "reader.js", "page.js")
"""The page of one run."""
RUNS = _document("runs.html", "compare.js", "runs.js")
"""The list of several runs."""
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(document: Document, data: dict[str, Any], *, title: str, live: bool) -> str:
    """The HTML of a page. data: see `elements.js`; title: any text; live: with requests to its own server."""
    # names that a template lacks are errors, and texts are escaped unless they are Markup
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template(document.template).render(
        title=title,
        policy=policy(document, live=live),
        programs=_texts(document.programs),
        styles=_texts(STYLES),
        data=Markup(escaped_json(data)),
    )


def _texts(paths: Sequence[Path]) -> list[Markup]:
    return [Markup(path.read_text(encoding="utf8")) for path in paths]


def policy(document: Document, *, live: bool) -> str:
    """The content security policy of a page. live: requests to its own server are allowed."""
    # hashes, not 'self' or a nonce: nothing but these programs runs, also in a page that is saved as a file
    scripts = " ".join(map(_hash, document.programs))
    styles = " ".join(map(_hash, STYLES))
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src {connect}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def escaped_json(data: Any) -> str:
    """JSON that can stand in a script element: it contains no `<`, `>`, `&` and no line separator of JavaScript."""
    return msgspec.json.encode(data).decode().translate(_ESCAPES)


def _hash(path: Path) -> str:
    # the browser hashes the element's text, so this reads the file as `_texts` does
    digest = hashlib.sha256(path.read_text(encoding="utf8").encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

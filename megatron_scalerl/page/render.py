"""Renders the page as one HTML string, with a content security policy that lets no foreign script run.

Data is JSON in a script element that is not executed, with `<`, `>`, `&` and JavaScript's line separators escaped.
The page's scripts write data as text only. The policy names the hash of each script and style, so that no text of a
completion is executed. Requests are allowed to the page's own server alone.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_scalerl.page.find_runs import FoundRuns
from megatron_scalerl.page.runs_index import run_row
from megatron_scalerl.processes.logs import printable

PAGE_FOLDER = Path(__file__).parent
TEMPLATES = PAGE_FOLDER / "templates"
UPLOT = PAGE_FOLDER / "uplot"
STYLES = (UPLOT / "uPlot.min.css", TEMPLATES / "page.css")


PROGRAMS = (
    UPLOT / "uPlot.iife.min.js",
    *(TEMPLATES / name for name in ("elements.js", "charts.js", "figures.js", "reader.js", "page.js")),
)
"""JavaScript of the page of a run, in the order of execution."""
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(data: dict[str, Any], *, title: str, live: bool) -> str:
    """The HTML of a run's page. data: described in `elements.js`. live: the page may send requests to its own
    server."""
    return _rendered("page.html", PROGRAMS, live, title=title, data=Markup(escaped_json(data)))


def runs_page(folder: Path, search: FoundRuns, addresses: Mapping[Path, str]) -> str:
    """The HTML of the list of runs, without scripts. addresses: URL of each run's page, relative to the list."""
    rows = [run_row(path, str(path.relative_to(folder)), addresses.get(path, "")) for path in search.runs]
    folder_name = printable(str(folder))
    return _rendered("runs.html", (), False, folder=folder_name, rows=rows, left_out=search.left_out)


def _rendered(template: str, programs: Sequence[Path], live: bool, **values: Any) -> str:
    # StrictUndefined makes an unknown name an error; autoescape escapes every text that is no Markup
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template(template).render(
        policy=policy(programs, live=live), programs=_texts(programs), styles=_texts(STYLES), **values
    )


def _texts(paths: Sequence[Path]) -> list[Markup]:
    return [Markup(path.read_text(encoding="utf8")) for path in paths]


def policy(programs: Sequence[Path], *, live: bool) -> str:
    """The content security policy of a page. live: allow requests to the page's own server."""
    # the policy names hashes, not 'self' or a nonce: no other program runs, also in a page that is saved as a file
    scripts = " ".join(map(_hash, programs)) or "'none'"
    styles = " ".join(map(_hash, STYLES))
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src {connect}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def escaped_json(data: Any) -> str:
    """JSON for a script element, without `<`, `>`, `&` and JavaScript's line separators."""
    return msgspec.json.encode(data).decode().translate(_ESCAPES)


def _hash(path: Path) -> str:
    # the browser hashes the text in the page, so the file is read as text, with the line ends that the page gets
    digest = hashlib.sha256(path.read_text(encoding="utf8").encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

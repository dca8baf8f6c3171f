"""The HTML report: one file with verdict, figures and tables that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from megatron_scalerl.fit import tables
from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.tables import RunReport

TEMPLATES = Path(__file__).parent / "templates"


def write_html(
    path: str | Path,
    runs: Sequence[RunReport],
    *,
    figure: Path,
    comparison: Comparison | None = None,
    efficiency_figure: Path | None = None,
) -> Path:
    """Write the report on `runs` to `path`, the figures (PNG or SVG) embedded.

    efficiency_figure: of the comparison. Raises OSError.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # autoescape: names of runs and columns are the user's text
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(data_uri=_data_uri, subscript=_subscript)
    page = environment.get_template("report.html").render(
        title=f"Forecast of {runs[0].fit.name if len(runs) == 1 else f'{len(runs)} runs'}",
        sources=list(dict.fromkeys(run.curve.source.name for run in runs)),
        runs=runs,
        figure=figure,
        comparison=comparison,
        efficiency_figure=efficiency_figure,
        tables=tables,
    )
    path.write_text(page, encoding="utf-8")
    return path


def _data_uri(path: Path) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _subscript(header: str) -> Markup:
    """C_mid as C with a subscript."""
    return Markup(re.sub(r"\b([A-Z])_(\w+)", r"\1<sub>\2</sub>", str(escape(header))))

"""The HTML report: one file with verdict, figures and tables that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from megatron_scalerl.fit import tables, verdicts
from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.result import SOLID_AND_DASHED
from megatron_scalerl.fit.tables import RunReport

TEMPLATES = Path(__file__).parent / "templates"


Figures = Sequence[tuple[Path, str]]
"""(PNG or SVG, what it shows)."""


def write_html(
    path: str | Path,
    runs: Sequence[RunReport],
    *,
    figure: Path,
    comparison: Comparison | None = None,
    comparison_figures: Figures = (),
) -> Path:
    """Write the report on `runs` to `path`, the figures embedded. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = _rendered(
        "report.html",
        title=f"Forecast of {runs[0].fit.name if len(runs) == 1 else f'{len(runs)} runs'}",
        lines=SOLID_AND_DASHED,
        runs=runs,
        figure=figure,
        comparison=comparison,
        comparison_figures=comparison_figures,
    )
    path.write_text(page, encoding="utf-8")
    return path


def comparison_page(comparison: Comparison | None, *, title: str, notes: Sequence[str], figures: Figures) -> str:
    """The page of a comparison, the figures embedded. notes: lines below the title; comparison: None before it."""
    return _rendered("comparison.html", title=title, notes=notes, comparison=comparison, figures=figures)


def _rendered(template: str, **values: object) -> str:
    # autoescape: names of runs and columns are the user's text
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, **blocks
    )
    environment.filters.update(data_uri=_data_uri, subscript=_subscript)
    # globals: imported macros see no others
    environment.globals.update(tables=tables, verdicts=verdicts)
    return environment.get_template(template).render(**values)


def _data_uri(path: Path) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _subscript(header: str) -> Markup:
    """C_mid as C with a subscript."""
    return Markup(re.sub(r"\b([A-Z])_(\w+)", r"\1<sub>\2</sub>", str(escape(header))))

"""The HTML report: one file with verdict, figures and tables that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.tables import (
    RunReport,
    comparison_table,
    forms_table,
    parameters_table,
    predictions_table,
)

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report on one run or several."""

    title: str
    """Heading and title of the page."""
    runs: Sequence[RunReport]
    """The runs, the reference first."""
    figure: Path
    """PNG or SVG of the forecast."""
    comparison: Comparison | None = None
    """None for a report without one."""
    efficiency_figure: Path | None = None
    """The figure of `comparison`."""

    @property
    def sources(self) -> list[str]:
        """File or folder names of the inputs."""
        return list(dict.fromkeys(run.curve.source.name for run in self.runs))


def write_html(path: str | Path, report: Report) -> Path:
    """Write the report to `path`, its figures embedded. Raises OSError."""
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
        report=report,
        parameters=parameters_table(report.runs),
        predictions=predictions_table(report.runs),
        comparison=None if report.comparison is None else comparison_table(report.comparison),
        forms_table=forms_table,
    )
    path.write_text(page, encoding="utf-8")
    return path


def _data_uri(path: Path) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _subscript(header: str) -> Markup:
    """C_mid as C with a subscript."""
    return Markup(re.sub(r"\b([A-Z])_(\w+)", r"\1<sub>\2</sub>", str(escape(header))))

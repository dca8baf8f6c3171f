"""One HTML file with figures, tables and verdict; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.decide import Decision
from megatron_scalerl.fit.forms import FormScore
from megatron_scalerl.fit.result import FitResult, Prediction
from megatron_scalerl.fit.text import reach, spread
from megatron_scalerl.fit.wording import short_number, unit_name

CSS = """
body{font:16px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:860px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}p.sub{color:#555;margin:0 0 1rem}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .5rem;text-align:right;border-bottom:1px solid #e2e2e2;white-space:nowrap}
th{font-weight:600;border-bottom:2px solid #999;white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;white-space:normal}small{color:#666}
img{width:100%;height:auto;display:block;margin:.5rem 0}.scroll{overflow-x:auto}
.verdict{border-left:6px solid #666;background:#f5f5f5;padding:.6rem .9rem;margin:.6rem 0}
.go{border-color:#009E73}.halt{border-color:#D55E00}.wait{border-color:#E69F00}
.verdict b{text-transform:uppercase;letter-spacing:.03em}ul{padding-left:1.2rem}li{margin:.25rem 0}
""".strip()
SHADE = {"go on": "go", "stop": "halt", "too early to say": "wait"}


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Everything a report says about one run."""

    fit: FitResult
    predictions: Sequence[Prediction]
    decision: Decision
    forms: Sequence[FormScore] = ()
    backtest_figure: Path | None = None
    backtest_words: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report on one run or several."""

    title: str
    runs: Sequence[RunReport]
    figure: Path
    comparison: Comparison | None = None
    efficiency_figure: Path | None = None
    sources: Sequence[str] = field(default_factory=tuple)


def write_html(path: str | Path, report: Report) -> Path:
    """Write the report; every figure is embedded, so the one file can be mailed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="sub">{escape(", ".join(report.sources))}</p>',
        *(_verdict(run) for run in report.runs),
        _image(report.figure, "Points, fitted curve, forecast with its 90 % interval, and asymptote"),
        "<p><small>Filled points were fitted, hollow ones were not. The band is where a newly measured point of the "
        "same validation size falls with a probability of 90 %. The long-dashed line is the asymptote A.</small></p>",
        "<h2>Fit</h2>",
        _parameters(report.runs),
        _predictions(report.runs),
        *_warnings(report.runs),
    ]
    if report.comparison is not None:
        body += _comparison(report.comparison, report.efficiency_figure)
    for run in report.runs:
        body += _background(run)
    body.append(
        "<h2>How to read this</h2><p>The curve is R(C) = R<sub>0</sub> + (A − R<sub>0</sub>) / "
        "(1 + (C<sub>mid</sub> / C)<sup>B</sup>): A is where the recipe ends, C<sub>mid</sub> the compute at half "
        "of the gain, B how steeply it gets there (Khatri et al. 2025, arXiv 2510.13786, eq. 1). "
        "Brackets are 90 % intervals.</p>"
    )
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"<head>{meta}<title>{escape(report.title)}</title><style>{CSS}</style></head>"
    page = f"<!doctype html><html lang=en>{head}<body>{''.join(body)}</body></html>\n"
    path.write_text(page, encoding="utf-8")
    return path


def _image(path: Path, alt: str) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(alt)}" src="data:image/{kind};base64,{data}">'


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in header)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _verdict(run: RunReport) -> str:
    decision = run.decision
    reason = decision.reason[0].upper() + decision.reason[1:]
    return (
        f'<div class="verdict {SHADE[decision.verdict]}"><b>{decision.verdict}</b> · {escape(run.fit.name)}<br>'
        f"{escape(reason)}.</div>"
    )


def _parameters(runs: Sequence[RunReport]) -> str:
    header = ["run", "A", "B", "C<sub>mid</sub>", "R<sub>0</sub>", "points", "rmse", "95 % of A at"]
    rows = [
        [
            escape(r.fit.name),
            _small(spread(r.fit.asymptote, r.fit.intervals["asymptote"], "{:.3f}")),
            _small(spread(r.fit.exponent, r.fit.intervals["exponent"], "{:.2f}")),
            _small(spread(r.fit.midpoint, r.fit.intervals["midpoint"], None)),
            f"{r.fit.initial:.3f}",
            str(r.fit.n_points),
            f"{r.fit.rmse:.4f}",
            _small(reach(r.decision.to_asymptote)),
        ]
        for r in runs
    ]
    return _rows(header, rows)


def _small(text: str) -> str:
    value, bracket, rest = text.partition(" [")
    return f"{value}<br><small>{bracket.strip()}{rest}</small>" if bracket else value


def _predictions(runs: Sequence[RunReport]) -> str:
    rows = [
        [escape(r.fit.name), short_number(p.compute), f"{p.pass_rate:.4f}", f"[{p.lo:.4f}, {p.hi:.4f}]"]
        for r in runs
        for p in r.predictions
    ]
    unit = escape(unit_name(runs[0].fit.unit))
    return "<h2>Forecast</h2>" + _rows(["run", unit, "pass rate", "90 % interval"], rows)


def _warnings(runs: Sequence[RunReport]) -> list[str]:
    lines = [f"<li><b>{escape(r.fit.name)}</b>: {escape(w)}</li>" for r in runs for w in r.fit.warnings]
    return [f"<h2>Warnings</h2><ul>{''.join(lines)}</ul>"] if lines else []


def _comparison(comparison: Comparison, figure: Path | None) -> list[str]:
    header = [
        "run",
        "C<sub>mid</sub>",
        "B",
        "A",
        f"B at A = {comparison.fixed_asymptote:.3f}",
        f"compute to {comparison.pass_rate:.3f}",
    ]
    rows = [
        [
            escape(c.fit.name),
            short_number(c.fit.midpoint),
            f"{c.fit.exponent:.2f}",
            f"{c.fit.asymptote:.3f}",
            "–" if c.refit is None else f"{c.refit.exponent:.2f}",
            _small(reach(c.to_reach)),
        ]
        for c in comparison.contenders
    ]
    words = "".join(f"<li>{escape(sentence)}</li>" for sentence in comparison.sentences())
    out = ["<h2>Comparison</h2>", _rows(header, rows), f"<ul>{words}</ul>"]
    if figure is not None:
        out.append(_image(figure, "Efficiency transform: the slope of each line is B"))
    return out


def _background(run: RunReport) -> list[str]:
    out = []
    if run.backtest_figure is not None:
        out += [f"<h2>Back-test: {escape(run.fit.name)}</h2>", f"<p>{escape(run.backtest_words)}</p>"]
        out.append(_image(run.backtest_figure, "Forecast of the last point from every prefix of the run"))
    if run.forms:
        rows = [
            [
                s.form,
                "–" if s.asymptote != s.asymptote else f"{s.asymptote:.3f}",
                "–" if s.held_back_error != s.held_back_error else f"{s.held_back_error:.4f}",
                f"{s.aicc:.1f}",
            ]
            for s in run.forms
        ]
        out += [f"<h2>Other forms: {escape(run.fit.name)}</h2>"]
        out.append(_rows(["form", "A", "error of the last 30 %, held back", "AICc"], rows))
    return out

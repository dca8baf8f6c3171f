"""Fit the first 8k GPU-hours of a run, forecast the rest, and decide: the library in forty lines.

    python examples/fit_a_curve.py [figure.png]

The run is ScaleRL-8B at batch 768, digitized from Khatri et al. (2025, arXiv 2510.13786), Fig. 2.
"""

import sys
from pathlib import Path

from megatron_scalerl.fit.decide import decide
from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.inputs import ColumnOptions, read_curves
from megatron_scalerl.fit.plot import plot_forecast

POINTS = Path(__file__).parent / "curves" / "points.csv"
RUN = ColumnOptions(series=(("figure", "fig2_recipes"), ("series", "ScaleRL")))


def main(figure: str | None) -> None:
    [run] = read_curves(POINTS, RUN)
    seen = run.compute <= 8000
    result = fit(
        run.compute[seen],
        run.pass_rate[seen],
        initial=0.4007,  # the pass rate before RL, R_0
        prompts=1000,
        generations=16,  # the validation size: how noisy a point is
        name="ScaleRL-8B",
    )
    low, high = result.intervals["asymptote"]
    print(f"A = {result.asymptote:.3f} [{low:.3f}, {high:.3f}], B = {result.exponent:.2f}")
    for warning in result.warnings:
        print("warning:", warning)

    measured = dict(zip(run.compute[~seen], run.pass_rate[~seen]))
    for forecast in result.predict(list(measured)):
        print(
            f"{forecast.compute:7.0f} GPU-hours: forecast {forecast.pass_rate:.4f} "
            f"[{forecast.lo:.4f}, {forecast.hi:.4f}], measured {measured[forecast.compute]:.4f}"
        )
    print(decide(result, budget=8000, worth=0.005).sentence())
    if figure is not None:
        print(plot_forecast(figure, result, unseen={result.name: (run.compute[~seen], run.pass_rate[~seen])}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)

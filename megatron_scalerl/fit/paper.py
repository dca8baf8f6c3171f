"""The authors' fit: a grid over A and C_mid, only B fitted (Khatri et al. 2025, arXiv 2510.13786, A.5).

For every (A, C_mid) of the grid, B is fitted by `scipy.optimize.curve_fit` from its default start with R_0 fixed, and
the triple with the smallest sum of squares is kept. Departures from the paper:

* `curve_fit` runs only for the (A, C_mid) with the lowest sums of squares over a table of exponents B. This does not
  change the result.
* The C_mid grid is refined once around the best value. This does not change the result.
* The printed grid (100 values on 100..40000) cannot produce the published C_mid. The published values lie on
  `linspace(100, 4000, 100)` and `linspace(4000, 40000, 100)`, so both grids are tried and the better fit is kept.
"""

import warnings
from operator import itemgetter

import numpy as np

from megatron_scalerl.fit.sigmoid import Array, gain_share

FIT_FROM = 1500.0
"""Compute (GPU-hours) below which the paper's authors leave points out: the first epoch rises almost linearly."""
ASYMPTOTES = np.round(np.arange(0.450, 0.8001, 0.005), 3)
"""Values of A in the paper's grid."""
MIDPOINTS = (np.linspace(100.0, 4000.0, 100), np.linspace(4000.0, 40000.0, 100))
"""Values of C_mid (GPU-hours) in the two grids that are tried."""
MIDPOINT_REFERENCE = 8000.0
"""Length of a run (GPU-hours) that `MIDPOINTS` suit. For a run of at most `FIT_FROM` or at least 400,000 the grids
are scaled."""
_EXPONENTS = np.geomspace(0.1, 20.0, 120)
"""Values of B for which sums of squares are tabulated before `curve_fit` runs."""
_CANDIDATES = 60
"""Number of (A, C_mid) with the lowest tabulated sums of squares for which `curve_fit` fits B."""


def fit_paper(
    compute: Array, pass_rate: Array, *, initial: float, fixed_asymptote: float | None = None
) -> tuple[dict[str, float], tuple[float, float]]:
    """Fit points [n] by the authors' procedure; R_0 = `initial` is held fixed.

    fixed_asymptote: the only A of the grid; None for the grid of the paper. Returns (asymptote, exponent and midpoint
    of the best fit, by name; lowest and highest C_mid that was tried).
    """
    asymptotes = ASYMPTOTES if fixed_asymptote is None else np.array([fixed_asymptote])
    # a run whose last compute is between 1.5k and 400k is taken to be in GPU-hours, the unit of the paper's grids
    scale = 1.0
    if not FIT_FROM < compute.max() < 10.0 * MIDPOINTS[-1][-1]:
        scale = compute.max() / MIDPOINT_REFERENCE
    # all values of both grids are tried: each published C_mid lies on one of the two grids
    grids = [grid * scale for grid in MIDPOINTS]
    cells = [best_cell(compute, pass_rate, initial, asymptotes, grid) for grid in grids]
    coarse = min(cells, key=itemgetter(0))
    lowest = float(grids[0][0])
    highest = float(grids[-1][-1])
    # 4000 is on both grids, with different spacings: the wider spacing reaches the neighbors on both grids
    step = max(grid[1] - grid[0] for grid in grids if grid[0] <= coarse[2] <= grid[-1])
    fine = np.unique(np.clip(np.linspace(coarse[2] - step, coarse[2] + step, 41), lowest, highest))
    refined = best_cell(compute, pass_rate, initial, asymptotes, fine)
    _, asymptote, midpoint, exponent = min(coarse, refined, key=itemgetter(0))
    return {"asymptote": asymptote, "exponent": exponent, "midpoint": midpoint}, (lowest, highest)


def best_cell(
    compute: Array, pass_rate: Array, initial: float, asymptotes: Array, midpoints: Array
) -> tuple[float, float, float, float]:
    """(sum of squares, A, C_mid, B) of the grid's best (A, C_mid), with B fitted by `curve_fit`."""
    from scipy.optimize import OptimizeWarning, curve_fit

    squares = _table(compute, pass_rate, initial, asymptotes, midpoints)
    order = np.argsort(squares, axis=None, kind="stable")[:_CANDIDATES]
    best = (np.inf, float(asymptotes[0]), float(midpoints[0]), 1.0)
    for i, j in zip(*np.unravel_index(order, squares.shape)):

        def model(c: Array, exponent: float, gain: float = asymptotes[i] - initial, m: float = midpoints[j]) -> Array:
            return initial + gain * gain_share(c, exponent=exponent, midpoint=m)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)
            try:
                (exponent,), _ = curve_fit(model, compute, pass_rate, p0=[1.0])
            except RuntimeError:  # `curve_fit` has not converged: this (A, C_mid) is skipped
                continue
        misfit = float(np.sum((model(compute, exponent) - pass_rate) ** 2))
        # `curve_fit` runs without bounds; a negative B, for which the curve falls from A to R_0, is refused
        if misfit < best[0] and exponent > 0:
            best = (misfit, float(asymptotes[i]), float(midpoints[j]), float(exponent))
    return best


def _table(compute: Array, pass_rate: Array, initial: float, asymptotes: Array, midpoints: Array) -> Array:
    """[A, C_mid] for each pair, the smallest sum of squared residuals over the exponents B in `_EXPONENTS`."""
    share = gain_share(compute, exponent=_EXPONENTS[:, None], midpoint=midpoints[:, None, None])
    rise = pass_rate - initial
    gain = (asymptotes - initial)[:, None, None]
    # the square |rise - gain share|^2 is multiplied out, so that no array needs all four axes points, A, C_mid and B
    squares = rise @ rise - 2.0 * (share @ rise) * gain + (share**2).sum(axis=-1) * gain**2
    return squares.min(axis=2)

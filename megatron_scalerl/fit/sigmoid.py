"""The compute-performance law: a sigmoid in log compute (Khatri et al. 2025, arXiv 2510.13786, eq. 1).

    R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

Everything uses the logistic function of `B * log(C / C_mid)`, never a power of a compute: any C > 0, from 1e-300 to
1e300, gives a finite value and finite derivatives.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
PARAMETERS = ("asymptote", "exponent", "midpoint", "initial")
"""A, B, C_mid and R_0: the keyword arguments of `sigmoid`."""


def gain_share(compute: ArrayLike, *, exponent: ArrayLike, midpoint: ArrayLike) -> Array:
    """Share of the gain A - R_0 reached at `compute`: 1 / (1 + (C_mid/C)^B), in [0, 1]; arguments broadcast.

    `compute` and `midpoint` have the same unit. Raises ValueError for compute <= 0.
    """
    c = np.asarray(compute, dtype=float)
    if np.any(~(c > 0)):
        raise ValueError(f"compute is {float(np.min(c))!r}; it has to be greater than 0")
    return share_by_logs(np.log(c), np.asarray(exponent, dtype=float), np.log(midpoint))


def share_by_logs(log_compute: Array, exponent: Array, log_midpoint: Array) -> Array:
    """`gain_share` from the logs of compute and midpoint; a clipped logit keeps the exponential finite."""
    logit = exponent * (log_compute - log_midpoint)
    return 1.0 / (1.0 + np.exp(-np.clip(logit, -700.0, 700.0)))


def sigmoid(
    compute: ArrayLike, *, asymptote: ArrayLike, exponent: ArrayLike, midpoint: ArrayLike, initial: ArrayLike
) -> Array:
    """Pass rate R(C) after `compute` (Khatri et al. 2025, eq. 1); arguments broadcast.

    compute:   C > 0, training compute, in the unit of `midpoint`.
    asymptote: A, the pass rate at unlimited compute.
    exponent:  B > 0, the steepness; higher is more efficient at the same A.
    midpoint:  C_mid > 0, the compute at which half of the gain is reached: R(C_mid) = (A + R_0) / 2.
    initial:   R_0, the pass rate before any RL compute.
    Raises ValueError for compute <= 0.
    """
    start = np.asarray(initial, dtype=float)
    share = gain_share(compute, exponent=exponent, midpoint=midpoint)
    return start + (np.asarray(asymptote, dtype=float) - start) * share


def compute_to_reach(
    pass_rate: ArrayLike, *, asymptote: ArrayLike, exponent: ArrayLike, midpoint: ArrayLike, initial: ArrayLike
) -> Array:
    """Compute C at which R(C) = `pass_rate`: the inverse of `sigmoid`; arguments broadcast.

    inf for a pass rate at or above the asymptote, which no compute reaches; 0 for a pass rate at or below R_0.
    """
    target, a, r0 = (np.asarray(v, dtype=float) for v in (pass_rate, asymptote, initial))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # eq. 1 solved for C: (C / C_mid)^B = (R - R_0) / (A - R)
        ratio = (target - r0) / (a - target)
        log_c = np.log(midpoint) + np.log(ratio) / np.asarray(exponent, dtype=float)
        # exp(709) is still finite: inf is left to pass rates that no compute reaches
        reached = np.exp(np.minimum(log_c, 709.0))
    return np.where(target <= r0, 0.0, np.where(target >= a, np.inf, reached))

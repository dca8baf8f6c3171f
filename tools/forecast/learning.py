"""Learn the prior of the robust fit from known runs of both worlds (empirical Bayes).

`learn(without=(run,))` uses nothing of `run`. The shipped `DEFAULT_PRIOR` is `learn()`. Both worlds weigh the same,
and every physical run of one world the same, however many figures show it. Learned are

* the kind of every known run, by a rule (`Shape.kind`) on the sigmoid of the whole run under a wide prior, and from
  them the weights of the kinds;
* center and spread of log B and log(C_mid / compute of the run), and the mean gain, of the two kinds whose runs tell
  them: the distribution that explains the posteriors of its runs best (EM, each run's draws being reweighted);

The hypotheses on deviations are chosen, not learned (`megatron_scalerl.fit.prior.DISCREPANCIES`).

    python tools/forecast/learning.py
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from known_runs import KnownRun, by_run, known_runs

from megatron_scalerl.fit.observations import observe
from megatron_scalerl.fit.posterior import Posterior, log_cells, log_prior_density, sample
from megatron_scalerl.fit.prior import DISCREPANCIES, Kind, Prior, kind
from megatron_scalerl.fit.sigmoid import Array

CEILING, SOLVED, NO_GAIN, ANYTHING = "a ceiling below 1", "close to 1", "no gain", "anything"
"""The kinds."""
SHAPES = {CEILING: (8.0, 16.0), SOLVED: (6.0, 1.0), NO_GAIN: (1.0, 20.0), ANYTHING: (1.0, 1.0)}
"""Kind -> Beta parameters of the gain. Of `CEILING` the mean is learned; the others say what their names say."""
SOLVED_FROM = 0.7
"""Share of the room above R_0 that the ceiling of a run of `SOLVED` takes."""
LEAST_GAIN = 0.05
"""Rise in pass rate over the whole run below which it is of `NO_GAIN`."""
WIDE_EXPONENT, WIDE_MIDPOINT = (0.6, 0.5), (0.0, 1.2)
"""(center, spread) of log B and log(C_mid / compute of the run) where a kind says nothing about them."""
LEAST_SPREADS = (0.25, 0.5)
"""Spreads of log B and log C_mid that a kind has at least: its runs are few, the next one can differ."""
PSEUDO_SHARE = 0.05
"""Added to every kind's share of the runs."""
REFERENCE = Prior(kinds=(kind(1.0, (0.6, 0.8), (0.0, 1.5), (1.0, 1.0)),), discrepancies=DISCREPANCIES[:3])
"""A wide prior, under which known runs are fitted: a run that has left its sigmoid, or turned, tells no kind."""
DRAWS = 1000
"""Draws from the posterior of each."""
ROUNDS = 40
"""Of the EM over the draws."""
NORMAL = 1e6
"""Degrees of freedom at which Student's t is normal. Center and spread are learned as those of a normal distribution;
the prior has heavier tails, for runs unlike those."""


def learn(without: Iterable[str] = ()) -> Prior:
    """The prior learned from all known runs except `without`."""
    runs = {run: of_run for run, of_run in by_run(known_runs()).items() if run not in frozenset(without)}
    worlds = [of_run[0].world for of_run in runs.values()]
    weights = np.array([1.0 / worlds.count(world) / len({*worlds}) for world in worlds])
    shapes = [_shape(tuple(of_run)) for of_run in runs.values()]
    kinds = []
    for name in SHAPES:
        of_kind = np.array([shape.kind == name for shape in shapes])
        found = _kind(name, [shape for shape in shapes if shape.kind == name], weights[of_kind])
        share = float(weights[of_kind].sum() + PSEUDO_SHARE) / (1.0 + len(SHAPES) * PSEUDO_SHARE)
        kinds.append(replace(found, weight=share))
    return Prior(kinds=tuple(kinds), discrepancies=DISCREPANCIES)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sigmoid of a whole known run: draws from its posterior under `REFERENCE`."""

    gain: Array = field(repr=False)
    """[draws] (A - R_0) / (1 - R_0)."""
    rise: Array = field(repr=False)
    """[draws] rise of the sigmoid up to the run's end."""
    log_exponent: Array = field(repr=False)
    """[draws] log B."""
    log_midpoint: Array = field(repr=False)
    """[draws] log(C_mid / compute of the run)."""
    log_reference: Array = field(repr=False)
    """[draws] log density of `REFERENCE`."""

    @property
    def kind(self) -> str:
        """The name of its kind."""
        if np.median(self.rise) < LEAST_GAIN:
            return NO_GAIN
        if np.median(self.log_midpoint) > 0.0:
            return ANYTHING  # its ceiling was not seen
        return SOLVED if np.median(self.gain) > SOLVED_FROM else CEILING


@cache
def _shape(of_run: tuple[KnownRun, ...]) -> Shape:
    """The draws from all figures that show one physical run."""
    parts = []
    for known in of_run:
        observations = observe(known.curve.part(known.own), REFERENCE)
        p = sample(observations, prior=REFERENCE, draws=DRAWS // len(of_run))
        gain, rise = (
            (p.asymptote - p.initial) / (1.0 - p.initial),
            p.curves(np.array([known.reach]))[:, 0] - p.initial,
        )
        parts.append((gain, rise, np.log(p.exponent), p.log_midpoint, log_prior(p, REFERENCE)))
    gain, rise, log_exponent, log_midpoint, log_reference = (np.concatenate(columns) for columns in zip(*parts))
    return Shape(
        gain=gain, rise=rise, log_exponent=log_exponent, log_midpoint=log_midpoint, log_reference=log_reference
    )


def log_prior(posterior: Posterior, prior: Prior) -> Array:
    """[draws] log density of `prior` at the draws, up to a constant; -inf where it lacks the draw's hypothesis."""
    weight_of = {replace(d, weight=0.0): d.weight for d in prior.discrepancies}
    with np.errstate(divide="ignore"):
        weights = np.log([weight_of.get(replace(d, weight=0.0), 0.0) for d in posterior.discrepancies])
    gain = (posterior.asymptote - posterior.initial) / (1.0 - posterior.initial)
    cells = log_cells(np.log(posterior.exponent), posterior.log_midpoint, prior)
    density = log_prior_density(cells, gain, prior)
    return density + weights[posterior.hypothesis]


def _kind(name: str, own: Sequence[Shape], of_runs: Array) -> Kind:
    """A kind with the centers and spreads that explain its runs best; wide ones where they say nothing.

    own, of_runs: [runs] its runs, and the weight of each.
    """
    alpha, beta = SHAPES[name]
    kind = Kind(
        weight=1.0,
        log_exponent_mean=WIDE_EXPONENT[0],
        log_exponent_sd=WIDE_EXPONENT[1],
        log_midpoint_mean=WIDE_MIDPOINT[0],
        log_midpoint_sd=WIDE_MIDPOINT[1],
        gain_alpha=alpha,
        gain_beta=beta,
    )
    for _ in range(ROUNDS if own and name in (CEILING, SOLVED) else 0):
        weights = [_responsibilities(shape, kind) for shape in own]
        exponent = _center_and_spread([s.log_exponent for s in own], weights, of_runs, LEAST_SPREADS[0])
        midpoint = _center_and_spread([s.log_midpoint for s in own], weights, of_runs, LEAST_SPREADS[1])
        gain = float(np.average([w @ s.gain for w, s in zip(weights, own)], weights=of_runs))
        kind = replace(
            kind,
            log_exponent_mean=exponent[0],
            log_exponent_sd=exponent[1],
            log_midpoint_mean=midpoint[0],
            log_midpoint_sd=midpoint[1],
            gain_alpha=(alpha + beta) * gain if name == CEILING else alpha,
            gain_beta=(alpha + beta) * (1.0 - gain) if name == CEILING else beta,
        )
    return kind


def _responsibilities(shape: Shape, kind: Kind) -> Array:
    """[draws] weights, summing to 1, of a run's draws under the distribution of a kind."""
    whole = Prior(kinds=(kind,), freedom=NORMAL, discrepancies=())
    cells = log_cells(shape.log_exponent, shape.log_midpoint, whole)
    log_weights = log_prior_density(cells, shape.gain, whole) - shape.log_reference
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum())


def _center_and_spread(draws: list[Array], weights: list[Array], of_runs: Array, least: float) -> tuple[float, float]:
    """Mean and standard deviation over runs, each with its own draws and weights; the latter at least `least`."""
    center = float(np.average([w @ x for w, x in zip(weights, draws)], weights=of_runs))
    squares = [w @ (x - center) ** 2 for w, x in zip(weights, draws)]
    return center, max(float(np.average(squares, weights=of_runs)) ** 0.5, least)


def parser() -> argparse.ArgumentParser:
    """No options."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main() -> None:
    """Print the kinds of the known runs, and the learned prior."""
    parser().parse_args()
    for run, of_run in by_run(known_runs()).items():
        shape = _shape(tuple(of_run))
        medians = {name: f"{np.median(getattr(shape, name)):.2f}" for name in Shape.__annotations__}
        print(f"{of_run[0].world:9s} {run:28s} {shape.kind:18s} {medians}")
    print(learn())


if __name__ == "__main__":
    main()

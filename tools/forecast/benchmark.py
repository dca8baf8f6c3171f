"""How well each method forecasts runs that it knows nothing about: published ones and tiny ones.

    python tools/forecast/benchmark.py [--held-back | --others DIR]

Leave one run out: the prior that forecasts a run is learned from the other runs alone (`learning`; what is fixed
there is fixed for all runs). The same published run appears in several figures and is left out as a whole
(examples/curves/runs.csv); "setting left out": with all runs of its task, policy and warm start. Tiny runs are
forecast from the first half of their steps; published ones from the authors' fitted part, and from a half, a third
and a quarter of it.
--held-back: the tiny runs that no prior knows, with the shipped one. --others: curves that do not ship, by
repository. Of every method: error, share of the points inside, share of the curves with 80 % of theirs inside,
interval score, and the geometric ratio of interval scores to those of a random walk.
"""

import argparse
from functools import cache
from pathlib import Path

import numpy as np
from known_runs import PUBLISHED, TINY, known_runs, others, tasks
from learning import learn
from methods import OTHERS, bootstrap, by_fit, ratio, summarize
from synthetic import SCENARIOS, coverage

from megatron_scalerl.fit.decide import decide

ROBUST, SETTING = "robust", "robust, setting left out"
WORTH = 0.02
"""Gain of the second half from which going on was right."""
ENDS = 3
"""Points at half and at the end whose means tell what the second half gained."""


def of_world(world):
    """The runs of one world."""
    return [known for known in known_runs() if known.world == world]


@cache
def prior_without(*runs):
    """What is learned from all other runs."""
    return learn(runs)


def left_out(task):
    """`robust` with the prior that is learned without the run."""
    return by_fit(prior=prior_without(task.known.run))(task)


def setting_left_out(task):
    """`robust` with the prior that is learned without all runs of the same task, policy and warm start.

    The published runs share one setting: their prior is learned from the tiny runs alone.
    """
    runs = sorted({known.run for known in known_runs() if known.setting == task.known.setting})
    return by_fit(prior=prior_without(*runs))(task)


def gained(task):
    """Whether the second half gained `WORTH`: the last points' mean less that of the last fitted ones."""
    y = task.known.curve.pass_rate
    return bool(y[task.unseen][-ENDS:].mean() - y[task.fitted][-ENDS:].mean() >= WORTH)


def verdict(task, prior):
    """What `decide` says at the end of the fitted part on the rest of the run."""
    c = task.known.curve.compute
    budget = float(c[task.unseen].max() - c[task.fitted].max())
    return decide(task.fit(prior=prior), budget=budget, worth=WORTH).verdict


def thumb(task):
    """The rule of thumb: the slope of the last third of the fitted points, kept up, gains `WORTH` or not."""
    known, end = task.known.curve.part(task.fitted), float(task.known.curve.compute[task.unseen].max())
    last = max(len(known.compute) // 3, ENDS)
    slope = np.polyfit(known.compute[-last:], known.pass_rate[-last:], 1)[0]
    return "go on" if slope * (end - known.compute[-1]) >= WORTH else "stop"


def judged(found):
    """Verdicts compared with what the second halves gained: how many were right, wrong, or "too early to say"."""
    sure = [(task, said == "go on") for task, said in found if said != "too early to say"]
    right = sum(went == gained(task) for task, went in sure)
    return f"{right} right, {len(sure) - right} wrong, {len(found) - len(sure)} open"


def parser():
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--held-back", action="store_true", help="the tiny runs that nothing is learned from, alone")
    made.add_argument("--others", type=Path, help="a folder of other people's curves (`known_runs.others`), alone")
    return made


def main(arguments=None):
    """Print the scores of every method on both worlds, the decisions, and the coverage on synthetic runs."""
    chosen = parser().parse_args(arguments)
    if chosen.others is not None:
        for part in ("half", "third"):
            _print_settings(f"others, from {part}", tasks(others(chosen.others), part), {ROBUST: by_fit(), **OTHERS})
        return
    if chosen.held_back:
        _print("tiny, held back, from half", tasks(known_runs(held_back=True), "half"), {ROBUST: by_fit(), **OTHERS})
        return
    methods = {ROBUST: left_out, SETTING: setting_left_out, **OTHERS}
    for world, part in [(TINY, "half"), *((PUBLISHED, part) for part in ("authors", "half", "third", "quarter"))]:
        _print(f"{world}, from {part}", tasks(of_world(world), part), methods, each=world == TINY)
    for world in (TINY, PUBLISHED):
        halves = tasks(of_world(world), "half")
        ours = judged([(task, verdict(task, prior_without(task.known.run))) for task in halves])
        slope = judged([(task, thumb(task)) for task in halves])
        print(f"{world}, verdicts at half time: {ours}; last slope: {slope}")
    for name, scenario in SCENARIOS.items():
        points, parameters = coverage(scenario)
        print(f"synthetic, {name}: {points:.3f} of new points and {parameters:.3f} of A, B, C_mid inside")


def _print(title, found, methods, *, each=True):
    outcomes = {name: [method(task) for task in found] for name, method in methods.items()}
    print(f"\n{title}: {len(found)} curves of {len({task.known.run for task in found})} runs")
    if each:
        for o in outcomes[ROBUST]:
            print(f"    {o.name:24s} {_line([o])}")
    for name, own in outcomes.items():
        print(f"{name:28s} {_line(own)}")
    spread = bootstrap(outcomes[ROBUST])
    print(f"{ROBUST}, 90 % over runs:  " + ", ".join(f"{k} [{v[0]:+.3f}, {v[1]:+.3f}]" for k, v in spread.items()))
    ours = summarize(outcomes[ROBUST]).error
    print("error below: " + ", ".join(f"{n} {1 - ours / summarize(outcomes[n]).error:+.1%}" for n in OTHERS))


def _print_settings(title, found, methods):
    """Every method by setting (repository, or task and policy), and over all curves."""
    settings = sorted({task.known.setting for task in found})
    print(f"\n{title}: {len(found)} curves of {len(settings)} settings")
    outcomes = {name: [method(task) for task in found] for name, method in methods.items()}
    for name, of_method in outcomes.items():
        for setting in (*settings, "all"):
            chosen = [n for n, task in enumerate(found) if setting in (task.known.setting, "all")]
            pairs = [(of_method[n], outcomes["random walk"][n]) for n in chosen]
            print(f"{name:22s} {setting:52s} {_line(*zip(*pairs))}")


def _line(outcomes, reference=None):
    s = summarize(outcomes)
    ratio_to_walk = "" if reference is None else f"  of the walk's {ratio(outcomes, reference):.2f}"
    return (
        f"points {s.points:3d}  error {s.error:.4f}  signed {s.signed:+.4f}  by run {s.by_run:.4f}  "
        f"inside {s.coverage:.3f}  curves {s.covered_runs:.2f}  interval score {s.winkler:.3f}"
        f"{ratio_to_walk}  half width {s.half_width:.4f}"
    )


if __name__ == "__main__":
    main()

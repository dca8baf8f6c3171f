"""A line through the levels of policy sizes of one recipe: its slope, its error, its forecast, its refusal."""

import json

import numpy as np
import pytest
from command_line import command
from recipe_runs import curve_of

from megatron_scalerl.fit.decide import Estimate
from megatron_scalerl.fit.forecast import fit_curve
from megatron_scalerl.fit.sigmoid import sigmoid
from megatron_scalerl.fit.sizes import Size, ladder_of, line_at

SIZES = [0.6, 1.7, 4.0, 8.0]
NEXT = 20.0
main = command("fit")


def levels_of(sizes, slope=-0.4, walk=0.0, rng=None):
    """Failures fall with the slope from 0.3 at a size of 1, and depart from that as a random walk."""
    departures = np.zeros(len(sizes))
    if walk:
        steps = walk * np.sqrt(np.diff(np.log(sizes), prepend=np.log(sizes[0])))
        departures = np.cumsum(steps * rng.standard_normal(len(sizes)))
    return 1.0 - 0.3 * np.asarray(sizes) ** slope * np.exp(departures)


def run_to(asymptote, seed):
    """A run that ends at its ceiling, measured with binomial noise."""
    compute = np.linspace(2.0, 40.0, 20)
    true = sigmoid(compute, asymptote=asymptote, exponent=3.0, midpoint=5.0, initial=0.2)
    measured = np.random.default_rng(seed).binomial(8000, true) / 8000
    return curve_of(compute, measured, initial=0.2, generations=8)


def written(folder, levels):
    """Arguments of `fit`: a table per run."""
    paths = []
    for number, asymptote in enumerate(levels):
        curve = run_to(asymptote, number)
        rows = [f"{step:g},{rate:.5f}" for step, rate in zip(curve.compute, curve.pass_rate)]
        paths.append(folder / f"size{number}.csv")
        paths[-1].write_text("\n".join(["step,pass_rate", "0,0.2", *rows]) + "\n")
    return [*paths, "--prompts", "1000", "--generations", "8"]


def measured(sizes, levels, deviation, rng=None):
    """Sizes whose log failures are known up to a standard deviation, and are off by it where a generator is given."""
    errors = rng.normal(0.0, deviation, len(sizes)) if rng else np.zeros(len(sizes))
    unused = {key: Estimate(value=0.5, lo=0.0, hi=1.0) for key in ("asymptote", "level")}
    numbers = zip(sizes, np.log(1.0 - np.asarray(levels)) + errors)
    return [Size(parameters=n, log_failures=y, log_variance=deviation**2, **unused) for n, y in numbers]


def test_intervals_of_slope_and_forecast_contain_what_is_drawn():
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(100):
        slope = rng.normal(-0.3, 0.2)
        *levels, came = levels_of([*SIZES, NEXT], slope, walk=0.1, rng=rng)
        level, doubling = line_at(measured(SIZES, levels, 0.03, rng), NEXT)
        inside.append((level.lo < came < level.hi, doubling.lo < 2.0**slope < doubling.hi))
    assert np.all(np.mean(inside, axis=0) >= 0.85), np.mean(inside, axis=0)


def test_a_slope_that_is_hardly_known_is_shrunk_to_as_the_largest():
    """Each doubling halves the failures: 0.8, 0.4, 0.2."""
    known, doubling = line_at(measured([1.0, 2.0, 4.0], [0.2, 0.6, 0.8], 0.01), 8.0)
    assert known.value == pytest.approx(0.9, abs=0.02) and doubling.value == pytest.approx(0.5, abs=0.08)
    _, doubling = line_at(measured([1.0, 2.0, 4.0], [0.2, 0.6, 0.8], 0.5), 8.0)
    assert 0.62 < doubling.value < 0.85
    # every draw of a perfect run has the highest level
    perfect, _ = line_at(measured([1.0, 2.0, 4.0], [0.999] * 3, 0.0), 4.0)
    assert perfect.value == pytest.approx(0.999)


def test_a_ladder_of_runs(capsys, tmp_path):
    *levels, came = levels_of([*SIZES, NEXT])
    runs = written(tmp_path, levels)
    assert main([*runs, "--across-sizes", "0.6,1.7,4,8", "--next", "20", "--json", tmp_path / "out.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("by the other sizes") < printed.index("Mean error for a left-out size")
    assert printed.index("Mean error for a left-out size") < printed.index("forecast of size 20:")
    ladder = json.loads((tmp_path / "out.json").read_text())["across_sizes"]
    assert [size["parameters"] for size in ladder["sizes"]] == SIZES
    assert [size["level"]["value"] for size in ladder["sizes"]] == pytest.approx(levels, abs=0.01)
    assert ladder["next_level"]["lo"] < came < ladder["next_level"]["hi"]
    assert ladder["next_level"]["value"] == pytest.approx(came, abs=0.015)
    assert ladder["doubling"]["lo"] < 2.0**-0.4 < ladder["doubling"]["hi"]
    # as the largest of the others: 8 for all but itself, which is as 4
    as_largest = [levels[3] - levels[0], levels[3] - levels[1], levels[3] - levels[2], levels[3] - levels[2]]
    assert ladder["largest_error"] == pytest.approx(np.mean(as_largest), abs=0.01)
    assert ladder["line_error"] < 0.25 * ladder["largest_error"]


def test_order_and_unit_of_the_sizes_do_not_matter_and_seeds_of_one_size_are_averaged():
    fits = [fit_curve(run_to(level, seed)) for seed, level in enumerate([0.5, 0.6, 0.7, 0.74])]
    first = ladder_of(fits, [1.0, 2.0, 4.0, 4.0], 8.0)
    again = ladder_of(fits[::-1], [4e9, 4e9, 2e9, 1e9], 8e9)
    assert [size.parameters for size in first.sizes] == [1.0, 2.0, 4.0]
    assert first.sizes[2].level.value == pytest.approx(0.72, abs=0.01)
    assert again.next_level.value == pytest.approx(first.next_level.value, abs=2e-3)


@pytest.mark.parametrize(
    "levels, sizes, next_size, refusal",
    [
        ([0.6, 0.8], "1,2", "16", "a line takes at least 3 sizes, and 2 were given"),
        ([0.6, 0.7, 0.8], "1,2,2", "16", "a line takes at least 3 sizes, and 2 were given"),
        ([0.6, 0.7, 0.8], "1,2", "16", "2 sizes were given for 3 runs, which are size0, size1, size2"),
        ([0.6, 0.7, 0.8], "0,1,2", "16", "every size has to be greater than 0"),
        ([0.6, 0.7, 0.8], "1,2,3", "0", "every size has to be greater than 0"),
        ([0.6, 0.7, 0.8], "1B,2B,3B", "16", "'1B,2B,3B' is not a list of finite numbers"),
        ([0.9, 0.5, 0.8, 0.6], "1,2,4,8", "16", "no line is drawn, as a line misses a left-out size by"),
    ],
)
def test_what_makes_no_line_is_refused(capsys, tmp_path, levels, sizes, next_size, refusal):
    assert main([*written(tmp_path, levels), "--across-sizes", sizes, "--next", next_size]) == 2
    captured = capsys.readouterr()
    assert refusal in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""

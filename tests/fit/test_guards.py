"""What keeps a forecast honest: an unknown R_0, a plateau, a random walk as a peer, curves that do not ship."""

from types import SimpleNamespace

import numpy as np
import pytest
from forms import fit_random_walk
from known_runs import others

from megatron_scalerl.fit.checks import rising_forecast
from megatron_scalerl.fit.decide import decide
from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.observations import initial_candidates


def test_an_unknown_start_is_at_or_below_a_clear_first_point_and_on_both_sides_of_a_noisy_one():
    rising = np.linspace(0.2, 0.6, 12)
    candidates = initial_candidates(rising)
    assert candidates[-1] == pytest.approx(rising[:3].mean()) and candidates[0] < 0.2
    noisy = 0.3 + 0.2 * np.array([-1, 1, -1, 1, 1, -1, 1, -1, -1, 1, -1, 1])
    candidates = initial_candidates(noisy)
    assert candidates[0] < noisy[:3].mean() < candidates[-1]


def test_no_stop_rests_on_a_start_that_was_assumed():
    compute, rates = np.arange(1.0, 13.0), np.array([0.6, *np.tile([0.40, 0.41], 6)[:11]])
    given, assumed = (fit(compute, rates, initial=initial, draws=500) for initial in (0.6, None))
    assert "most points lie below R_0" in decide(given).reason
    assert "R_0" not in decide(assumed).reason
    assert not any("below R_0" in warning for warning in assumed.warnings)


@pytest.mark.parametrize("last, gain, warned", [(0.5, 0.1, True), (0.5, 0.01, False), (0.6, 0.1, False)])
def test_a_forecast_that_rises_beside_points_that_do_not_is_said(last, gain, warned):
    rates = np.concatenate([np.linspace(0.2, 0.5, 12), np.linspace(0.5, last, 6)])
    posterior = SimpleNamespace(true_pass_rate=lambda compute: (np.array([[0.5, 0.5 + gain]]), None))
    assert (rising_forecast(np.arange(1.0, 19.0), rates, posterior) is not None) == warned


def test_a_random_walk_stays_where_it_is_and_gets_less_certain():
    rng = np.random.default_rng(0)
    compute = np.geomspace(1.0, 10.0, 40)
    walk = fit_random_walk(compute, 0.5 + np.cumsum(rng.normal(0.0, 0.02, 40)))
    mean, spread = walk(np.array([10.0, 20.0, 100.0]))
    assert mean == pytest.approx([walk.pass_rate[-1]] * 3, abs=0.03) and mean[1] == pytest.approx(mean[2])
    assert spread[0] < spread[1] < spread[2]
    assert spread[2] ** 2 - spread[1] ** 2 == pytest.approx(walk.rate * np.log(5.0))


def test_curves_of_others_are_read_from_their_folder(tmp_path):
    columns = "name,kind,repo,prompts,generations,duplicate_of_another"
    rows = ["a,val,someone/repo,100,2,", "b,train,someone/repo,,,", "c,val,someone/repo,,,yes", "d,train,one/more,,,"]
    (tmp_path / "sources.csv").write_text("\n".join([columns, *rows]))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.csv").write_text("step,score\n0,0.1\n20,0.3\n10,0.2\n30,\n")
    (tmp_path / "data/b.csv").write_text("step,score\n0,0.1\n1,0.3\n")
    (tmp_path / "data/d.csv").write_text("step,score\n0,-0.1\n1,0.3\n")
    known, batches = others(tmp_path)
    assert (known.setting, known.curve.initial, known.curve.prompts) == ("someone/repo", 0.1, 100)
    assert (batches.setting, batches.curve.initial) == ("someone/repo, training batches", None)
    assert batches.curve.compute.tolist() == [1, 2] and batches.curve.prompts is None
    assert known.curve.compute.tolist() == [10, 20] and known.curve.pass_rate.tolist() == [0.2, 0.3]

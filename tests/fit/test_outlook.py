"""The forecast of a run's end after each validation: what it is made from, and that it can be made again."""

import numpy as np
import pytest

from megatron_scalerl.fit.outlook import outlook, outlooks
from megatron_scalerl.fit.sigmoid import sigmoid


def rows(steps=20):
    compute = np.linspace(0.02, 0.4, steps)
    curve = sigmoid(compute, asymptote=0.8, exponent=1.8, midpoint=0.08, initial=0.4)
    measured = np.random.default_rng(6).binomial(3200, curve) / 3200
    return [
        {"step": 5 * n, "compute": float(c), "pass_rate": float(y), "prompts": 400, "generations": 8}
        for n, (c, y) in enumerate(zip([0.0, *compute], [0.4, *measured]))
    ]


@pytest.mark.slow
def test_the_end_is_forecast_from_the_fourth_validation_on():
    made = outlooks(rows(), steps=100)
    assert [each.step for each in made] == list(range(20, 100, 5))
    came = rows()[-1]["pass_rate"]
    assert made[-1].hi - made[-1].lo < 0.6 * (made[0].hi - made[0].lo)
    assert abs(made[-1].pass_rate - came) < 0.02 and made[0].line().startswith("at step 100: 0.")
    assert made[0].verdict == "go on"  # from four points, by the probability


@pytest.mark.slow
def test_later_rows_do_not_change_what_was_said():
    known = rows()[:9]
    said = outlook(known, steps=100)
    assert outlooks(rows(), steps=100)[4] == said
    assert outlooks(known, steps=100)[4:] == [said]
    again = [*known[:8], {**known[8], "pass_rate": 0.1}, known[8]]  # a step that was validated again
    assert outlook(again, steps=100) == said


@pytest.mark.slow
def test_each_of_many_validations_counts():
    many = rows(steps=400)
    said = outlook(many, steps=3000)
    for number in (201, 202, 203):  # none is left out
        other = [*many[:number], {**many[number], "pass_rate": many[number]["pass_rate"] - 0.01}, *many[number + 1 :]]
        assert outlook(other, steps=3000) != said


@pytest.mark.parametrize(
    "given, options",
    [
        (rows()[:4], {"steps": 100}),  # three validations
        (rows()[1:9], {"steps": 100}),  # no step 0
        (rows()[:9], {"steps": 40}),  # the end itself
        (rows()[:9], {"steps": 100, "fit_from_steps": 30}),
        ([rows()[0], *({**rows()[4], "step": n} for n in range(1, 9))], {"steps": 100}),  # one and the same
    ],
)
def test_what_is_too_little(given, options):
    assert outlook(given, **options) is None


@pytest.mark.slow
def test_a_forecast_of_unconfirmed_rewards_says_so():
    audited = [row | {"confirmed_share": 0.4, "confirmed_least": 0.95} for row in rows()[:9]]
    line = outlook(audited, steps=100).line()
    assert "; the second judge confirms 40% of the paid answers of step 40, too few to trust" in line
    confirmed = [row | {"confirmed_share": 0.96} for row in audited]
    assert "second judge" not in outlook(confirmed, steps=100).line()

"""Recipes compared: runs grouped by recipe, the ceiling and the efficiency, what is said of few runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from command_line import command
from published import published_run
from recipe_runs import curve_of, write_run

from megatron_scalerl.fit.arms import arms_of, differences
from megatron_scalerl.fit.compare import compare_runs, conclusions, left_out, summary
from megatron_scalerl.fit.forecast import fit_curve
from megatron_scalerl.fit.inputs import ColumnOptions, read_curves
from megatron_scalerl.fit.tables import comparison_json, estimated_compute

CISPO, DAPO = "loss: {name: cispo}", "loss: {name: dapo}"
main = command("fit")


def compared(curves, *, method="robust", **options):
    return compare_runs(curves, {curve.name: fit_curve(curve, method=method) for curve in curves}, **options)


def read(folders):
    return [curve for folder in folders for curve in read_curves(folder)]


def two_recipes(tmp_path, *, seeds=(1, 2, 3), deviation=0.003, **dapo):
    """Folders of three runs each of a reference and of a recipe with `dapo`'s parameters."""
    rng = np.random.default_rng(2)
    out = []
    for seed in seeds:
        effect = rng.normal(0.0, 0.01)
        for name, recipe, changed in (("scalerl", CISPO, {}), ("dapo", DAPO, dapo)):
            curve = {"asymptote": 0.8, "exponent": 2.0, "midpoint": 0.05} | changed
            curve["asymptote"] += effect + rng.normal(0.0, deviation)
            out.append(write_run(tmp_path / f"{name}_seed{seed}", seed=seed, recipe=recipe, rng=rng, **curve))
    return out


def test_runs_of_one_recipe_are_an_arm(tmp_path):
    runs = ("quick_1", 1, CISPO), ("other", 1, DAPO), ("quick_2", 2, CISPO)
    rng = np.random.default_rng(0)
    written = [write_run(tmp_path / name, seed=seed, recipe=recipe, rng=rng) for name, seed, recipe in runs]
    longer = (written[2] / "recipe.yaml").read_text().replace("steps: 70", "steps: 90").replace("path: q", "path: q2")
    (written[2] / "recipe.yaml").write_text(longer + "engine: {start_timeout_s: 7}\nsft: {path: x}\n")
    arms = arms_of(read(reversed(written)))
    assert [(arm.name, [c.seed for c in arm.curves]) for arm in arms] == [("quick", [1, 2]), ("other", [1])]
    assert differences(arms[1], arms[0]) == "loss.name: dapo"


def test_two_runs_with_one_seed_are_told_apart_by_their_files(tmp_path):
    rng = np.random.default_rng(0)
    for name, path in (("small_1", "p"), ("small_2", "p"), ("large_1", "p8"), ("large_2", "p8")):
        folder = write_run(tmp_path / name, seed=int(name[-1]), recipe=CISPO, rng=rng)
        recipe = folder / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace("{path: p}", f"{{path: {path}}}"))
    names = [(arm.name, len(arm.curves)) for arm in arms_of(read(sorted(tmp_path.iterdir())))]
    assert names == [("large", 2), ("small", 2)]


def test_equal_recipes_with_other_names_stay_apart_where_seeds_repeat(tmp_path):
    """As in a job array of overlays, two of which change nothing on its base."""
    rng = np.random.default_rng(0)
    for seed in (1, 2):
        for name, recipe in (("base_dapo", DAPO), ("base_scalerl", CISPO), ("base_scalerl_bf16", CISPO)):
            write_run(tmp_path / f"{name}_seed{seed}", seed=seed, recipe=recipe, rng=rng)
    curves = read(sorted(tmp_path.iterdir()))
    comparison = compared(curves, references=["base_dapo=base_scalerl_bf16", "base_scalerl"])
    assert [(arm.name, arm.runs, arm.reference, arm.change) for arm in comparison.arms] == [
        ("base_scalerl", 2, None, ""),
        ("base_dapo", 2, "base_scalerl_bf16", "loss.name: dapo"),
        ("base_scalerl_bf16", 2, "base_scalerl", ""),
    ]
    # names that say no seed: runs of one recipe
    again = [replace(curve, name=f"again {n}") for n, curve in enumerate(curves) if "scalerl" in curve.name]
    assert [len(arm.curves) for arm in arms_of(again)] == [4]


def test_runs_whose_arm_is_known_are_grouped_by_it(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a_seed1", "a_seed2", "b_seed1"):
        write_run(tmp_path / name, seed=int(name[-1]), recipe=CISPO, rng=rng)
    curves = [replace(curve, arm=curve.name[0]) for curve in read(sorted(tmp_path.iterdir()))]
    assert [(arm.name, len(arm.curves)) for arm in arms_of(curves)] == [("a", 2), ("b", 1)]


def test_a_table_with_seeds(tmp_path):
    rows = [
        f"{recipe},{seed},{c},{0.4 + (0.1 if recipe == 'a' else 0.2) * c}\n"
        for recipe in "ab"
        for seed in (1, 2)
        for c in (1, 2)
    ]
    (tmp_path / "t.csv").write_text("recipe,seed,gpu_hours,pass_rate\n" + "".join(rows))
    options = ColumnOptions(series=(("recipe", "*"), ("seed", "*")))
    arms = arms_of(read_curves(tmp_path / "t.csv", options))
    assert [(arm.name, [c.seed for c in arm.curves]) for arm in arms] == [("a", [1, 2]), ("b", [1, 2])]


def test_the_ceiling_is_found_and_the_page_says_so(tmp_path, capsys):
    folders = [str(folder) for folder in two_recipes(tmp_path, asymptote=0.62)]
    assert main([*folders, "--compare", "--json", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "dapo lowers the ceiling: A -0.1" in out and "differs from the reference's: dapo (A -0.1" in out
    found = json.loads((tmp_path / "a.json").read_text())["comparison"]
    assert [(arm["name"], len(arm["runs"])) for arm in found["arms"]] == [("scalerl", 3), ("dapo", 3)]
    low, high = (found["arms"][1]["ceiling"][end] for end in ("lo", "hi"))
    assert low < -0.18 < high < 0.0


def test_the_efficiency_is_found_where_the_ceiling_is_kept(tmp_path):
    comparison = compared(read(two_recipes(tmp_path, midpoint=0.1)))
    dapo = comparison.arm("dapo")
    assert not dapo.ceiling.moves_the_ceiling and dapo.efficiency.declared
    assert (
        1.5 < np.exp(dapo.efficiency.value) < 2.6 and dapo.to_reach.value > comparison.arm("scalerl").to_reach.value
    )
    assert "It is less efficient" in summary(comparison, dapo)
    assert any("The efficiency differs from the reference's: dapo" in line for line in conclusions(comparison))


def test_a_compute_that_some_draws_never_reach_has_no_ends(tmp_path):
    comparison = compared(read(two_recipes(tmp_path, asymptote=0.66)), pass_rate=0.65)
    assert estimated_compute(comparison.arm("dapo").to_reach) == "0.204 [start, never]"


def test_what_cannot_be_told_apart_is_said(tmp_path):
    comparison = compared(read(two_recipes(tmp_path, deviation=0.04, seeds=(1, 2))))
    said = summary(comparison, comparison.arm("dapo"))
    assert "cannot be told from 2 runs" in said
    assert any(line.startswith("These seeds are too few") for line in conclusions(comparison))


def test_one_run_of_each_decides_nothing(tmp_path):
    comparison = compared(read(two_recipes(tmp_path, asymptote=0.6, seeds=(1,))))
    said = summary(comparison, comparison.arm("dapo"))
    assert "one run decides nothing" in said and "outside the paper's margin of ±0.02" in said
    lines = conclusions(comparison)
    assert "Nothing is decided" in lines[0] and not any("differs from" in line for line in lines)


def test_three_runs_of_one_recipe_differ_by_nothing_but_their_seeds(tmp_path):
    """A 0.63, 0.97 and 0.89 were once said to be three ceilings with a probability of 1."""
    rng = np.random.default_rng(1)
    ceilings = {1: 0.63, 2: 0.97, 3: 0.89}
    folders = [write_run(tmp_path / f"quickstart_{n}", seed=n, asymptote=a, rng=rng) for n, a in ceilings.items()]
    comparison = compared(read(folders))
    [arm] = comparison.arms
    assert (arm.name, arm.runs, arm.ceiling) == ("quickstart", 3, None)
    assert comparison.between_runs == pytest.approx(0.18, abs=0.06)
    assert arm.asymptote.lo < 0.65 and arm.asymptote.hi > 0.95


def collapsed(curve):
    """The run with its last four points near 0."""
    return replace(curve, pass_rate=np.r_[curve.pass_rate[:-4], 0.2, 0.1, 0.02, 0.01])


def test_a_run_that_falls_is_left_out_of_its_arm(tmp_path):
    curves = read(two_recipes(tmp_path, seeds=(1, 2)))
    steady = compared([curve for curve in curves if curve.name != "dapo_seed2"])
    fallen = [collapsed(curve) if curve.name == "dapo_seed2" else curve for curve in curves]
    comparison = compared(fallen)
    assert comparison.falling == {"dapo": ("dapo_seed2",)} and comparison.arm("dapo").seeds == (1,)
    assert [arm.asymptote for arm in comparison.arms] == [arm.asymptote for arm in steady.arms]
    assert comparison.pass_rate == steady.pass_rate and steady.falling == {}
    assert comparison.arm("dapo").to_reach == steady.arm("dapo").to_reach
    assert left_out(comparison) == ["dapo: 1 of 2 runs are left out, as pass rates fall: dapo_seed2."]
    assert comparison_json(comparison)["conclusions"][0] == left_out(comparison)[0]


def test_an_arm_that_falls_in_every_run_is_not_compared(tmp_path):
    curves = read(two_recipes(tmp_path, seeds=(1, 2)))
    half = [collapsed(curve) if curve.name.startswith("dapo") else curve for curve in curves]
    for references in ([], ["dapo"], ["scalerl=dapo"]):
        comparison = compared(half, references=references)
        [arm] = comparison.arms
        assert (arm.name, arm.runs, arm.ceiling) == ("scalerl", 2, None)
        [sentence] = left_out(comparison)
        assert sentence == (
            "dapo is not compared, not even as a reference, because the pass rates of all its runs fall: "
            "dapo_seed1, dapo_seed2."
        )
    nothing = compared([collapsed(curve) for curve in curves])
    assert nothing.arms == () and len(left_out(nothing)) == 2
    assert comparison_json(nothing)["pass_rate"] is None


def test_what_falls_is_printed_before_the_table(tmp_path, capsys):
    folders = two_recipes(tmp_path, seeds=(1,))
    rows = (folders[1] / "validation.jsonl").read_text().splitlines()
    for n, rate in ((-3, 0.1), (-2, 0.02), (-1, 0.01)):
        rows[n] = json.dumps(json.loads(rows[n]) | {"pass_rate": rate})
    (folders[1] / "validation.jsonl").write_text("\n".join(rows) + "\n")
    assert main([*map(str, folders), "--compare"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("dapo is not compared") < printed.index("┃ recipe")


def test_comparison_reads_like_the_leave_one_out_table():
    """Khatri et al. 2025, Fig. 4: all three runs share their ceiling; ScaleRL has the highest B there."""
    curves = []
    for name in ("fig8a_loo/ScaleRL", "LOO-prompt-lvl-adv-norm", "LOO-length-penalty"):
        series = published_run(name)
        whole = curve_of(series.compute, series.pass_rate, initial=series.initial, name=name)
        curves.append(whole.part(series.fitted))
    comparison = compared(curves, method="paper")
    assert [arm.ceiling and abs(arm.ceiling.value) <= 0.021 for arm in comparison.arms] == [None, True, True]
    reached = [arm.to_reach.value for arm in comparison.arms]
    assert reached[0] == min(reached)
    assert not any(arm.ceiling.declared or arm.efficiency.declared for arm in comparison.arms[1:])


def test_the_level_at_a_budget_has_a_best_recipe(tmp_path):
    """Ceilings 0.8 and 0.9, 20 C_mid at the end: the higher one is best there, and short runs may not tell."""
    curves = read(two_recipes(tmp_path, seeds=(1,), asymptote=0.9))
    whole = compared(curves, budget=0.0)
    longest = max(curve.compute[-1] for curve in curves)
    assert whole.budget == longest and sum(arm.best for arm in whole.arms) == pytest.approx(1.0)
    dapo = whole.arm("dapo")
    assert dapo.best > 0.95 and dapo.level.value == pytest.approx(0.88, abs=0.03)
    assert "the best with a probability of" in summary(whole, whole.arm("dapo")) and not dapo.gap.declared
    short = compared([curve.part(slice(0, 4)) for curve in curves], budget=longest)
    assert 0.2 < short.arm("dapo").best < dapo.best


def test_a_comparison_needs_two_runs(tmp_path):
    with pytest.raises(ValueError, match="at least two runs"):
        compared(read(two_recipes(tmp_path, seeds=(1,)))[:1])

"""Reading run folders, tables and exports; errors are one line."""

import numpy as np
import pytest
from json_lines import append
from refusals import refused

from megatron_scalerl.fit.inputs import ColumnOptions, read_curves


def write(tmp_path, text):
    path = tmp_path / "run.csv"
    path.write_text(text)
    return path


def run_folder(tmp_path):
    folder = tmp_path / "my_run"
    folder.mkdir()
    same = {"unit": "device_hours", "prompts": 200, "generations": 4, "truncated_share": 0.02}
    rows = [
        {**same, "step": n, "compute": 0.01 + n / 100, "compute_total": 0.02 + n / 80, "pass_rate": 0.4 + n / 200}
        for n in (0, 10, 20)
    ]
    append(folder / "validation.jsonl", *rows)
    return folder


def test_run_folder(tmp_path):
    folder = run_folder(tmp_path)
    for path in (folder, folder / "validation.jsonl"):
        (curve,) = read_curves(path)
        assert (curve.unit, curve.initial) == ("device_hours", 0.40) and curve.compute == pytest.approx([0.11, 0.21])
    (curve,) = read_curves(folder)
    assert curve.name == "my_run"
    assert curve.prompts == 200 and (curve.generations == 4).all()
    np.testing.assert_allclose(curve.pass_rate, [0.45, 0.50])
    np.testing.assert_allclose(curve.truncated_share, [0.02, 0.02])
    (total,) = read_curves(folder, ColumnOptions(compute="compute_total"))
    np.testing.assert_allclose(total.compute, [0.145, 0.27])


def test_a_step_validated_again_after_a_resume_counts_once_with_its_last_value(tmp_path):
    folder = run_folder(tmp_path)
    append(folder / "validation.jsonl", {"step": 20, "compute": 0.25, "unit": "device_hours", "pass_rate": 0.48})
    (curve,) = read_curves(folder)
    np.testing.assert_allclose(curve.compute, [0.11, 0.25])
    np.testing.assert_allclose(curve.pass_rate, [0.45, 0.48])


def test_named_columns_and_series(tmp_path):
    path = write(tmp_path, "who,cost,good\na,1,0.4\na,2,0.5\nb,1,0.3\nb,3,0.6\n")
    options = ColumnOptions(compute="cost", score="good", series=(("who", "b"),))
    (curve,) = read_curves(path, options)
    assert curve.name == "b" and curve.compute.tolist() == [1, 3] and curve.pass_rate.tolist() == [0.3, 0.6]
    both = read_curves(path, ColumnOptions(compute="cost", score="good", series=(("who", "*"),)))
    assert [c.name for c in both] == ["a", "b"]


def test_several_runs_in_one_table_are_noted(tmp_path):
    path = write(tmp_path, "run,gpu_hours,pass_rate\na,1,0.4\nb,2,0.5\n")
    assert "rows of 2 different run were fitted as one" in read_curves(path)[0].notes[0]
    assert read_curves(path, ColumnOptions(series=(("run", "b"),)))[0].notes == ()


def test_sizes_of_an_export_with_decimal_points(tmp_path):
    path = write(tmp_path, "compute,pass_rate,prompts,generations,step\n0,0.3,200.0,5.0,0\n1,0.4,200.0,4.0,1\n")
    (curve,) = read_curves(path.rename(tmp_path / "a.csv"))
    assert (curve.prompts, curve.initial_generations, curve.completions.tolist()) == (200, 5, [800.0])


def test_missing_inputs(tmp_path):
    with refused(r"none\.csv: "):
        read_curves(tmp_path / "none.csv")
    with refused(r"validation\.jsonl"):
        read_curves(tmp_path)
    path = write(tmp_path, "who,gpu_hours,pass_rate\na,1,0.4\n")
    with refused(r"who = b.* a$"):
        read_curves(path, ColumnOptions(series=(("who", "b"),)))
    with refused("--compute: there is no column 'cost'"):
        read_curves(path, ColumnOptions(compute="cost"))


def test_one_task_of_a_mixture_is_a_curve(tmp_path):
    same = {"pass_rate": 0.5, "prompts": 4, "prompts/code": 1}
    rows = [{**same, "step": n, "compute": float(n), "pass_rate/code": 0.1 * n} for n in range(4)]
    append(tmp_path / "validation.jsonl", *rows)
    (curve,) = read_curves(tmp_path, ColumnOptions(score="pass_rate/code"))
    assert (curve.pass_rate.tolist(), curve.initial, curve.prompts) == ([0.1, 0.2, 0.30000000000000004], 0.0, 1)
    assert read_curves(tmp_path)[0].prompts == 4


def test_a_row_of_step_0_is_the_start_in_text_as_in_json(tmp_path):
    """Its compute is not 0: the engines and the trainer have been started."""
    rows = "0,0.5,0.3,0.5\n10,1.5,0.4,\n20,2.5,0.5,0.4\n"
    [curve] = read_curves(write(tmp_path, "step,gpu_hours,accuracy,truncated_share\n" + rows))
    assert curve.initial == 0.3 and curve.compute.tolist() == [1.5, 2.5]
    np.testing.assert_array_equal(curve.truncated_share, [np.nan, 0.4])


def test_a_seed_that_pandas_wrote_as_a_fraction_is_a_seed(tmp_path):
    rows = "".join(f"a,{seed},{step},{step / 100}\n" for seed in ("1.0", "2.0") for step in (10, 20, 30))
    table = write(tmp_path, "recipe,seed,step,accuracy\n" + rows)
    curves = read_curves(table, ColumnOptions(series=(("recipe", "*"), ("seed", "*"))))
    assert [(curve.name, curve.seed) for curve in curves] == [("a seed 1", 1), ("a seed 2", 2)]

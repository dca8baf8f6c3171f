"""`tools/fit_curve.py` runs its own clone, reads a CSV as `megatron-scalerl fit` does and ends with its exit code."""

import json
import shutil
import sys

from programs import ROOT, ended, printed

from megatron_scalerl.fit.sigmoid import sigmoid


def ran(*arguments, cwd):
    return ended(sys.executable, ROOT / "tools/fit_curve.py", *arguments, cwd=cwd, PYTHONPATH="")


def test_a_csv_is_fitted_and_bad_input_is_one_line(tmp_path):
    truth = {"asymptote": 0.7, "exponent": 2.0, "midpoint": 20.0, "initial": 0.3}
    rows = [f"{step},{sigmoid(step, **truth):.4f}\n" for step in range(5, 105, 5)]
    (tmp_path / "curve.csv").write_text("step,pass_rate\n0,0.3\n" + "".join(rows))
    done = ran("curve.csv", "--predict", "200", "--json", "-", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    [fit] = json.loads(done.stdout)["fits"]
    assert abs(fit["asymptote"] - 0.7) < 0.02 and fit["unit"] == "steps" and fit["n_points"] == 20
    refused = ran("curve.csv", "--score", "reward", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "no column 'reward'" in refused.stderr


def test_the_clone_needs_no_installation(tmp_path):
    """Beside a copy of the tool stands a stub of the package, which the installed one does not replace."""
    package = tmp_path / "megatron_scalerl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("explained = None\ndef main(argv):\n    print('stub', *argv)\n")
    (tmp_path / "tools").mkdir()
    for name in ("fit_curve.py", "checkout.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    assert printed(sys.executable, tmp_path / "tools/fit_curve.py", "x", cwd=tmp_path) == "stub fit x\n"

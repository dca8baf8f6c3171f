"""A bundle for a GPU machine without a package index: what it refuses, and what its checks leave."""

import sys

from programs import ROOT, ended


def test_a_part_that_is_cut_writes_what_it_has_found(tmp_path):
    """By the script's own `part`, of pytest that a signal ends in its second test."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_sessionfinish(session):\n    open('report', 'w').write(str(session.testscollected))\n"
    )
    tests = "import time\ndef test_a(): pass\ndef test_b(): open('begun', 'w'); time.sleep(600)\n"
    (tmp_path / "test_slow.py").write_text(tests)
    text = (ROOT / "tools/offline_try.sh").read_text()
    function = text[text.index("part() {") : text.index("\nchecks()")]
    script = f'results=.\n{function}\npart cut 20 "$0" -m pytest -q -p no:cacheprovider test_slow.py\n'
    done = ended("bash", "-c", script, sys.executable, cwd=tmp_path)
    assert (tmp_path / "begun").exists() and "try.sh: cut: exit code 1" in done.stdout  # 124, or 137 where it is slow
    assert (tmp_path / "report").read_text() == "2"


def refused(*argv):
    done = ended("bash", "tools/offline_bundle.sh", *argv)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    return done.stderr


def test_refusals_in_one_line(tmp_path):
    assert "--have: expected a file of pip freeze" in refused(tmp_path / "out", "--have", tmp_path / "none")
    assert "expected an option (--help), found '--pyt'" in refused(tmp_path / "out", "--pyt", "x")
    assert "expected packages to fetch" in refused(tmp_path / "out", "--only", "no-such-package")
    assert f"{tmp_path} exists" in refused(tmp_path)
    assert not list((tmp_path / "out").glob("wheels/*"))

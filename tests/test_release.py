"""The archives of a release: built, installed in an empty environment, and complete."""

import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from programs import ROOT, ended, printed

import megatron_scalerl

PARTS = ("megatron_scalerl", "recipes", "examples")
FILES = (
    "setup.cfg",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
)
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
VERSION = megatron_scalerl.__version__


def test_the_version_is_the_same_everywhere():
    assert f"\nversion = {VERSION}\n" in (ROOT / "setup.cfg").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
    assert f"megatron_scalerl-{VERSION}-py3-none-any.whl" in (ROOT / "docs/installing.md").read_text()
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def run(*command, folder):
    return printed(*command, cwd=folder, PYTHONPATH="")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(wheel, source archive), the wheel built from the unpacked source archive, as `python -m build` does."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in PARTS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    run(sys.executable, "-c", BUILD, "build_sdist", out, folder=tree)
    [source] = out.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(out / "unpacked", filter="data")
    [unpacked] = (out / "unpacked").iterdir()
    run(sys.executable, "-c", BUILD, "build_wheel", out, folder=unpacked)
    [wheel] = out.glob("*.whl")
    return wheel, source


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(archives):
    wheel, _ = archives
    assert wheel.name == f"megatron_scalerl-{VERSION}-py3-none-any.whl"
    package = ROOT / "megatron_scalerl"
    paths = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(ROOT).as_posix() for path in paths}
    assert {"megatron_scalerl/py.typed", "megatron_scalerl/fit/templates/report.html"} <= wanted
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == wanted


@pytest.mark.slow
def test_the_source_archive_has_recipes_and_examples(archives):
    _, source = archives
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    recipes = {path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml")}
    assert recipes | {"examples/quickstart.sh", "examples/curves/points.csv", "LICENSE", "CHANGELOG.md"} <= names
    assert not any(name.startswith("tests/") for name in names)


@pytest.mark.slow
def test_the_wheel_installs_and_its_quickstart_runs(archives, tmp_path):
    """In an environment that has nothing else; the dependencies are those of this one, on the path behind it."""
    wheel, _ = archives
    venv.create(tmp_path / "env", with_pip=True)
    python, program = tmp_path / "env/bin/python", tmp_path / "env/bin/megatron-scalerl"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, folder=tmp_path)
    assert VERSION in run(program, "--version", folder=tmp_path)
    [site] = (tmp_path / "env/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import megatron_scalerl; print(megatron_scalerl.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    curve = ROOT / "examples/curves/points.csv"
    words = f"fit {curve} --series figure=fig1a_scalerl_100k --series series=ScaleRL-bs2048-8B --r0 0.4018"
    told = run(program, *words.split(), "--html", "report.html", folder=tmp_path)
    assert "verdict: " in told and (tmp_path / "report.html").stat().st_size
    few = "-m megatron_scalerl.tiny tiny --seed 1 --train-prompts 200 --held-out 120 --sft-examples 10"
    run(python, *few.split(), folder=tmp_path)
    told = run(program, "prompts", "tiny/recipe.yaml", "policy.path=tiny/base_policy", folder=tmp_path)
    assert "the reference itself, " in told and "tokens that end a completion" in told


@pytest.mark.full
def test_the_core_alone_installs_under_python_3_11_and_forecasts(archives, tmp_path):
    """With its dependencies from the package index, and no torch; under this Python where there is no 3.11."""
    wheel, _ = archives
    found = ended("tools/find_python.sh", "3.11")
    run(found.stdout.strip() or sys.executable, "-m", "venv", "env", folder=tmp_path)
    python, program = tmp_path / "env/bin/python", tmp_path / "env/bin/megatron-scalerl"
    run(python, "-m", "pip", "install", "-q", wheel, folder=tmp_path)
    packages = run(python, "-m", "pip", "list", "--format", "freeze", folder=tmp_path).splitlines()
    assert not {"torch", "vllm", "megatron-core"} & {line.partition("==")[0] for line in packages}
    told = run(program, "fit", ROOT / "examples/verl_console.log", "--predict", "200", folder=tmp_path)
    assert "verdict: " in told

"""What tests of several folders start from. Checks on GPUs: which can run here, and a page of what they found.

    python -m pytest -m gpu tests/gpu --gpu-report FOLDER

Tests marked `gpu` are deselected where PyTorch sees no GPU. After a session with such tests FOLDER has
`gpu_report.md`, and `assumptions.yaml` with the planner's constants among the recorded figures, for `plan`.
"""

import asyncio
import importlib.util
import inspect
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
from own_processes import adopt_orphans
from sampling import SEED

from megatron_scalerl.tiny.build import TinyArguments, build

LONG = ("e2e", "engine", "slurm", "tools")
"""Folders whose files take minutes: pytest's workers take them first, so that none ends long after the others."""
ON_GPU = set()
"""Tests marked `gpu` that can run here; a report's keywords have the names of folders too."""
REPORTS = []
"""One for each of these that has finished."""


@pytest.fixture(autouse=True, scope="session")
def orphans_stay_below_this_process():
    """Tests look for what is left of a run among the processes below this one."""
    adopt_orphans()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A small tiny task with its policy; tests copy what they change."""
    folder = tmp_path_factory.mktemp("tiny_task") / "tiny"
    build(folder, TinyArguments(seed=1, train_prompts=100, held_out=20, sft_examples=32))
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine runs on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


def pytest_report_header():
    return f"cases of {SEED}: MSRL_TEST_SEED"


def pytest_addoption(parser):
    parser.addoption("--gpu-report", metavar="FOLDER", default="runs/gpu", help="for the page of the gpu tests")


def pytest_collection_modifyitems(config, items):
    """Deselect `gpu` without a GPU; skip what lacks GPUs or packages, with the reason. Long tests come first."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)  # stable: a file's tests stay together
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    found = 0
    if on_gpu:
        import torch

        found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    for item in items:
        for reason in _lacks(item, found):
            item.add_marker(pytest.mark.skip(reason=reason))
    ON_GPU.update(item.nodeid for item in on_gpu if found)
    if on_gpu and not found:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def _lacks(item, found):
    needed = item.get_closest_marker("gpus")
    if needed and item.get_closest_marker("gpu") and found < needed.args[0]:
        yield f"needs {needed.args[0]} GPUs, found {found}"
    for marker, package in (("te", "transformer_engine"), ("vllm", "vllm")):
        if item.get_closest_marker(marker) and importlib.util.find_spec(package) is None:
            yield f"{package} is not installed"


def pytest_runtest_logreport(report):
    if report.nodeid in ON_GPU and (report.when == "call" or report.outcome != "passed"):
        REPORTS.append(report)


def pytest_sessionfinish(session):
    """Write the page and the planner's constants."""
    if not REPORTS:
        return
    import harness

    from megatron_scalerl.cluster.probe import probe

    folder = Path(session.config.getoption("--gpu-report"))
    folder.mkdir(parents=True, exist_ok=True)
    names = harness.gpu_names()
    gpus = ", ".join(sorted({f"{names.count(name)} x {name}" for name in names}))
    facts = harness.machine() | {"driver": harness.nvidia_smi("driver_version")} | asdict(probe())
    lines = [f"# Checks on {gpus or 'no GPU'}, {datetime.now(UTC):%Y-%m-%d}", ""]
    lines += [f"* {name}: {_text(value)}" for name, value in facts.items()]
    lines += ["", "| check | result | seconds | figures, or the reason |", "|---|---|---|---|"]
    lines += [
        f"| {report.nodeid} | {report.outcome} | {report.duration:.0f} | {_said(report)} |" for report in REPORTS
    ]
    (folder / "gpu_report.md").write_text("\n".join(lines) + "\n")
    measured = [
        (dict(report.user_properties).get("layers"), dict(report.user_properties))
        for report in REPORTS
        if report.outcome == "passed"
    ]
    harness.write_constants(folder / "assumptions.yaml", measured, gpu=next(iter(names), ""), source="tests/gpu")


def _text(value):
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _said(report):
    """Recorded figures and, unless the check passed, the reason: one line without the home folder's path."""
    words = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in report.user_properties
    ]
    if report.outcome == "skipped":
        words.append(str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr))
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        words.append(getattr(crash, "message", str(report.longrepr)))
    line = " ".join("; ".join(words).split()).replace(str(Path.home()), "~").replace("|", "\\|")
    return line[:600]

"""How the runs of the loop part are set up and judged, without running them."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from waits import gone, limits_count_from

import megatron_scalerl
from megatron_scalerl.check_gpu import loop_run, programs, tiny_task
from megatron_scalerl.check_gpu.findings import Recorder, read_findings
from megatron_scalerl.check_gpu.loop_run import read_run
from megatron_scalerl.check_gpu.part import MARGIN_S, Deadline, PartSetting
from megatron_scalerl.check_gpu.parts import loop
from megatron_scalerl.check_gpu.programs import GRACE_S, CommandResult
from megatron_scalerl.check_gpu.table import part_named
from megatron_scalerl.check_gpu.tiny_task import recipe_path
from megatron_scalerl.recipe.file import load_recipe

EAGER, GRAPHS, MODEL = loop.RUNS


def setting(folder, **changes):
    module = part_named("loop").module
    values = dict(part="loop", module=module, on_gpu=True, size="full", layers=None, limit_s=300.0, gpus=1)
    return PartSetting(**values | changes, folder=str(folder), findings=str(folder / "findings.jsonl"))


def write_run(folder, *, steps=10, mismatch=0.002, reward=0.1, pass_rate=0.4, later=1.0, graphs=True):
    """later: mismatch from the fourth step on, times that of the first three."""
    rows = [
        {
            "step": step,
            "reward": reward,
            "loss_tokens_staleness_0": 100.0,
            "step_seconds": 2.0,
            "mismatch_staleness_0": mismatch if mismatch is None or step <= 3 else mismatch * later,
            "mismatch_mean": 9.0,
            "probe_mismatch_max": 0.1,
        }
        for step in range(1, steps + 1)
    ]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [{"step": 0, "skipped": 1}, *rows]))
    (folder / "validation.jsonl").write_text("".join(json.dumps({"pass_rate": p}) + "\n" for p in (0.0, pass_rate)))
    (folder / "logs").mkdir()
    said = "Graph capturing finished in 3 secs, took 0.25 GiB" if graphs else "Skipping CUDA graph capture."
    (folder / "logs" / "engine-0.log").write_text(f"enforce_eager=False\n{said}\n")
    return folder


def judged(tmp_path, run=EAGER, *, code=0, output="", on_gpu=True, warm=True, **written):
    found = read_run(write_run(tmp_path / "run", **written), CommandResult(seconds=30.0, code=code, output=output))
    record = Recorder("loop", tmp_path / "findings")
    loop._judge(setting(tmp_path, on_gpu=on_gpu), record, run, found, warm=warm)
    [finding] = read_findings(tmp_path / "findings")
    return finding


def test_the_declared_checks_are_those_of_the_runs():
    assert set(part_named("loop").checks) == {loop.WARM_START, loop.COMPARISON, *(run.check for run in loop.RUNS)}


def test_a_run_in_order_passes_with_its_figures(tmp_path):
    found = judged(tmp_path)
    assert (found.check, found.status, found.value) == ("loop/eager", "passed", pytest.approx(0.002))
    assert found.data["mismatch_tokens"] == 1000 and found.data["pass_rates"] == [0.0, 0.4]


@pytest.mark.parametrize(
    ("written", "detail"),
    [
        ({"mismatch": 0.02}, "mean |trainer - engine log-prob|"),
        ({"steps": 4}, "expected 10 steps, found 4 in 30 s"),
        ({"reward": None}, "expected a finite reward"),
        ({"pass_rate": 0.0}, "expected held-out pass rates above 0, found [0.0, 0.0]"),
        ({"mismatch": None}, "expected a finite number"),
        ({"code": 1, "output": "x\nmegatron-scalerl: engine-0 died"}, "code 1: megatron-scalerl: engine-0 died"),
        ({"code": None, "output": "step 3\n"}, "stopped at its time limit after 30 s; last log line: step 3"),
    ],
)
def test_what_is_wrong_with_a_run_fails_it(written, detail, tmp_path):
    found = judged(tmp_path, **written)
    assert found.status == "failed" and detail in found.detail
    assert found.data["steps"] == written.get("steps", 10)


@pytest.mark.parametrize(("graphs", "on_gpu", "status"), [(True, True, "passed"), (False, True, "failed")])
def test_a_run_with_graphs_has_to_capture_them(graphs, on_gpu, status, tmp_path):
    found = judged(tmp_path, GRAPHS, graphs=graphs, on_gpu=on_gpu)
    assert found.status == status
    assert ("expected captured CUDA graphs, found them on, no capture in its log" in found.detail) != graphs


def test_all_limits_fit_into_the_part():
    """Each run gets its own even if all before it were ended at theirs."""
    left = part_named("loop").limit_s - MARGIN_S - loop.WARM_START_S - GRACE_S
    for number, run in enumerate(loop.RUNS):
        limit = loop.run_limit(left, number)
        assert limit >= run.limit_s
        left -= limit + GRACE_S
    assert left == pytest.approx(0.0)


def test_a_run_needs_what_an_eager_run_has_taken(tmp_path):
    """30 s, 20 of them in 10 steps."""
    eager = read_run(write_run(tmp_path / "run"), CommandResult(seconds=30.0, code=0, output=""))
    assert loop.needs(GRAPHS, {"eager": eager})[0] == pytest.approx(30.0 + GRAPHS.more_s)
    assert loop.needs(MODEL, {"eager": eager})[0] == pytest.approx(10.0 + 3 * 2.0)
    assert loop.needs(MODEL, {"eager": replace(eager, ended="code 1")})[0] == MODEL.limit_s
    assert loop.needs(EAGER, {})[0] == EAGER.limit_s


def test_a_run_that_could_not_finish_is_not_started(tmp_path, monkeypatch):
    """The warm start is a stand-in that leaves 62 s."""

    async def no_time(*_):
        return None

    monkeypatch.setattr(loop, "_warm_start", no_time)
    one = setting(tmp_path)
    record = Recorder("loop", Path(one.findings))
    asyncio.run(loop._run(one, record, Deadline(62 + MARGIN_S), recipe_path(), tmp_path))
    found = {f.check.removeprefix("loop/"): f for f in read_findings(Path(one.findings))}
    assert found["eager"].status == "not run" and "expected 70 s of the part's time" in found["eager"].detail
    assert found["graphs"].status == "not run"


def test_without_a_warm_policy_no_pass_rate_is_asked_for_and_model_logits_have_no_bound(tmp_path):
    assert judged(tmp_path / "a", pass_rate=0.0, warm=False).status == "passed"
    assert judged(tmp_path / "b", MODEL, steps=3, mismatch=0.2, pass_rate=0.0).status == "measured"


@pytest.mark.parametrize(("exact", "coarse", "status"), [(0.01, 0.02, "passed"), (0.02, 0.01, "failed")])
def test_fp32_logits_have_to_come_closer_in_the_same_steps(exact, coarse, status, tmp_path):
    """What eager has after the third step, where the other run ends, does not count."""
    done = CommandResult(seconds=1.0, code=0, output="")
    runs = {
        name: read_run(write_run(tmp_path / name, mismatch=value, steps=steps, later=9.0), done)
        for name, value, steps in (("eager", exact, 10), ("model logits", coarse, 3))
    }
    loop._compare(setting(tmp_path), Recorder("loop", tmp_path / "findings"), runs)
    [found] = read_findings(tmp_path / "findings")
    assert (found.status, found.value) == (status, pytest.approx(exact / coarse))


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("size", ["full", "toy"])
def test_the_settings_of_every_run_are_a_recipe(size, warm, tmp_path):
    one = setting(tmp_path, size=size, on_gpu=size == "full")
    recipes = {}
    for run in loop.RUNS:
        settings = tiny_task.overrides(one, tmp_path, run, policy=tmp_path / "policy", warm=warm)
        tiny_task.check_overrides(recipe_path(), settings)
        recipes[run.check] = load_recipe(recipe_path(), settings)
    eager, graphs, model = (recipes[run.check] for run in loop.RUNS)
    assert (eager.policy.logits, graphs.policy.logits, model.policy.logits) == ("fp32", "fp32", "model")
    assert [r.engine.vllm["enforce_eager"] for r in (eager, graphs, model)] == [True, False, True]
    assert {r.weights.transport for r in recipes.values()} == {"gloo"}
    assert [r.validation.every_steps > 0 for r in (eager, graphs, model)] == [True, True, False]
    assert {r.engine.vllm.get("gpu_memory_utilization") for r in recipes.values()} == {
        0.3 if size == "full" else None
    }
    assert {r.filters.zero_variance for r in recipes.values()} == {warm and size == "full"}


def test_a_mistake_in_the_settings_costs_no_run(tmp_path, monkeypatch):
    wrong = tiny_task.Run(
        check="graphs", overrides=("engine.vllm.enforce_eagr=true",), steps=1, limit_s=1, on_cpu=False
    )
    monkeypatch.setattr(loop, "RUNS", (EAGER, wrong, MODEL))
    loop.run(one := setting(tmp_path, size="toy"), Recorder("loop", Path(one.findings)))
    found = {f.check.removeprefix("loop/"): f for f in read_findings(Path(one.findings))}
    assert found.keys() == set(part_named("loop").checks)
    assert found[loop.WARM_START].status == "failed" and "enforce_eagr" in found[loop.WARM_START].detail
    assert {f.status for name, f in found.items() if name != loop.WARM_START} == {"not run"}


def test_outside_of_a_checkout_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_scalerl, "__file__", str(tmp_path / "site" / "megatron_scalerl" / "__init__.py"))
    loop.run(one := setting(tmp_path), Recorder("loop", Path(one.findings)))
    found = {f.check: f for f in read_findings(Path(one.findings))}
    assert "expected the checkout's recipe, found nothing" in found["loop/warm start"].detail
    assert len(found) == len(part_named("loop").checks)


@pytest.mark.slow
def test_a_command_past_its_limit_is_ended_with_what_it_started(tmp_path, monkeypatch):
    """The command is a stand-in that starts a child and sleeps; its output is kept."""
    (tmp_path / "megatron_scalerl_stand_in.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, 'started', flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    started = programs.ChildProcess.start

    async def stand_in(name, argv, env, log):
        return await started(name, [sys.executable, "-m", "megatron_scalerl_stand_in"], env, log)

    monkeypatch.setattr(programs.ChildProcess, "start", stand_in)
    limits_count_from(monkeypatch, tmp_path / "x.log", "started\n")
    done = asyncio.run(loop_run.command(["train"], tmp_path / "x.log", limit_s=0.5))
    assert done.code is None and "last log line: child" in done.failure()
    assert gone(int(done.output.split()[1]))


def test_the_losses_of_a_warm_start_are_read_from_its_progress():
    text = "sft step 50/100  loss 1.5000  grad norm 1.0\nsft step 100/100  loss 0.4000  grad norm 1.0\n"
    assert loop_run.sft_losses(text) == [1.5, 0.4]

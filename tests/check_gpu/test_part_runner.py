"""Parts that hang, crash and lie, in the real runner. The parts are stand-ins; processes and signals are real."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from waits import gone, limits_count_from

from megatron_scalerl.check_gpu.runner import Machine, PartResult, run_parts
from megatron_scalerl.check_gpu.table import PARTS, Part, part_named

NOBODY = Machine(gpus=(), no_gpu="none here", modules=(), details={"cpu": "some"})


@pytest.fixture(autouse=True)
def stand_ins_can_be_imported(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


def part(name, **changes):
    settings = {"what": "a stand-in", "limit_s": 60, "rehearsal_s": 60, "checks": ("first", "second"), **changes}
    return Part(name=name, module="stand_in_parts", **settings)


def results(parts, out, machine=NOBODY, size="toy"):
    async def collect():
        return [result async for result in run_parts(parts, machine, size, out)]

    return asyncio.run(collect())


def statuses(result):
    return [finding.status for finding in result.findings]


def test_a_crash_a_torn_line_and_a_raise_end_their_part_alone(tmp_path):
    names = ("crash", "torn", "raising", "silent", "undeclared", "well")
    found = {result.name: result for result in results([part(name) for name in names], tmp_path)}
    assert statuses(found["crash"]) == ["passed", "not run"]
    assert found["crash"].end == "exit code -6: CUDA error: an illegal memory access was encountered"
    assert found["crash"].findings[1].detail == found["crash"].end
    assert statuses(found["torn"]) == ["passed", "not run"] and found["torn"].end == ""
    assert statuses(found["raising"]) == ["failed", "passed"]
    assert found["raising"].findings[0].detail == "ValueError: expected one line"
    assert found["silent"].findings[1].detail == "not reported by the part"
    assert found["undeclared"].end == "reported undeclared checks: undeclared/third"
    assert statuses(found["well"]) == ["passed", "passed"] and found["well"].end == ""
    assert PartResult.from_json(found["well"].to_json()) == found["well"]


@pytest.mark.slow
def test_a_hang_ends_at_its_limit_with_all_its_children(tmp_path, monkeypatch):
    limits_count_from(monkeypatch, tmp_path / "logs" / "hang.log", "about to hang")
    [result] = results([part("hang", rehearsal_s=1)], tmp_path)
    assert statuses(result) == ["passed", "not run"]
    assert result.end == "stopped at its time limit after 1 s; last log line: about to hang"
    assert gone(int((tmp_path / "scratch" / "child.pid").read_text()))


def test_leaving_early_ends_the_part_that_runs(tmp_path):
    child = tmp_path / "scratch" / "child.pid"

    async def leave():
        work = asyncio.ensure_future(anext(aiter(run_parts([part("hang")], NOBODY, "toy", tmp_path))))
        while not (child.exists() and child.read_text()):
            await asyncio.sleep(0.1)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert gone(int(child.read_text()))


def test_a_missing_requirement_is_reported_and_nothing_is_started(tmp_path):
    cut = part("well", not_on_cpu="no CPU kernels")
    assert [f.detail for f in results([cut], tmp_path)[0].findings] == ["no CPU kernels"] * 2
    few = results([part("well", gpus=2)], tmp_path, Machine(gpus=("A",), no_gpu="", modules=(), details={}), "full")
    assert [f.detail for f in few[0].findings] == ["expected 2 GPUs, found 1"] * 2
    lacking = results([part("well", package="vllm")], tmp_path)
    assert [f.detail for f in lacking[0].findings] == ["vllm is not installed"] * 2
    assert not (tmp_path / "logs").exists()


def test_a_rehearsal_hides_gpus_and_a_check_shows_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    two = Machine(gpus=("A", "A"), no_gpu="", modules=(), details={})
    [hidden] = results([part("told", layers="plain", rehearsal_s=600)], tmp_path)
    [shown] = results([part("told", quick_s=300)], tmp_path, two, "quick")
    told = hidden.findings[0].data
    assert (told["CUDA_VISIBLE_DEVICES"], told["MSRL_LAYERS"], told["HF_HUB_OFFLINE"]) == ("", "plain", "1")
    assert hidden.findings[1].data == {"on_gpu": False, "gpus": 0, "limit_s": pytest.approx(600, abs=100)}
    assert shown.findings[0].data["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert shown.findings[1].data == {"on_gpu": True, "gpus": 2, "limit_s": pytest.approx(300, abs=100)}


def test_kernel_caches_are_in_the_users_folder(tmp_path, monkeypatch):
    """And the layers are the part's, and vLLM logs what checks read, whatever the user has set for runs."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("MSRL_LAYERS", "te")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/anybody")
    [found] = results([part("told")], tmp_path)
    assert found.findings[0].data["MSRL_LAYERS"] is None
    assert found.findings[0].data["VLLM_LOGGING_LEVEL"] == "INFO"
    assert Path(found.findings[0].data["TRITON_CACHE_DIR"]).is_relative_to(tmp_path.resolve())


def test_a_group_that_outlives_its_kill_costs_no_findings(tmp_path, monkeypatch):
    """As one does while the driver gives 80 GB back. The stop is a stand-in."""

    async def stop(process, grace):
        raise RuntimeError(f"{process.name} still runs after SIGKILL")

    monkeypatch.setattr("megatron_scalerl.check_gpu.programs.ChildProcess.stop", stop)
    [found] = results([part("well")], tmp_path)
    assert statuses(found) == ["passed", "passed"] and found.end == "well still runs after SIGKILL"


def test_one_gpu_takes_at_most_25_minutes_and_quick_5():
    assert sum(part.limit_s for part in PARTS if part.gpus == 1) <= 25 * 60
    assert sum(part.quick_s or 0 for part in PARTS) <= 5 * 60


def test_the_table_names_no_check_twice():
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(part.checks and len(set(part.checks)) == len(part.checks) for part in PARTS)
    with pytest.raises(ValueError, match=r"expected some of environment, .*, found 'enviroment'"):
        part_named("enviroment")

"""`megatron-scalerl submit` on a real Slurm: refusals, arrays, requeues, chains, a whole run."""

import contextlib
import subprocess

import command_line
import pytest
from slurm_runs import (
    JOB,
    ROOT,
    STAND_IN_PROGRAM,
    WITH_STAND_INS,
    rows,
    starts,
    status,
    steps,
    submitted,
    wait_for,
    wait_for_end,
    write_recipe,
    write_site,
)

from megatron_scalerl.__main__ import main
from megatron_scalerl.cluster import cluster as slurm
from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.recipe.file import load_recipe

pytestmark = pytest.mark.slow


def refusal(words, capsys):
    line = command_line.refusal(words, capsys)
    assert slurm.queued() == []
    return line


@pytest.mark.parametrize(
    "options, said",
    [
        ("--partition gqu", "gqu is not a partition of this cluster; the nearest is gpu"),
        ("--partition k", "k is not a partition of this cluster; partitions here: gpu, others"),
        ("--time 1", "use at least 75 s"),
        ("--time 2-0", "more than the limit of partition gpu, 86400 s"),
        (
            "--nodes 2 engine.colocate=true engine.count=2 "
            "engine.vllm.kv_cache_memory_bytes=1 engine.vllm.gpu_memory_utilization=0.1",
            "--nodes: 2 is too many: a run with engine.colocate takes one node",
        ),
        ("policy.path=/nonexistent", "/nonexistent"),
    ],
)
def test_what_cannot_run_is_refused(stand_in, capsys, options, said):
    """What the nodes do not hold: test_allocation.py has all of it."""
    words, run = stand_in("0")
    line = refusal([*words, *options.split()], capsys)
    assert said in line
    assert not (run / "slurm/job.sbatch").exists()


def test_what_slurm_refuses_is_refused_by_the_dry_run(stand_in, tmp_path, capsys):
    words, _ = stand_in("0", "--dry-run")
    write_site(tmp_path / "site.yaml", STAND_IN_PROGRAM, sbatch={"constraint": "nosuch"})
    assert "job.sbatch: the cluster does not accept this job" in refusal(words, capsys)


def test_a_dry_run_submits_nothing(stand_in, capsys):
    words, run = stand_in("0", "--dry-run")
    assert main(words) == 0
    assert "nothing is submitted" in capsys.readouterr().out
    assert (run / "slurm/job.sbatch").exists() and slurm.queued() == [] and not starts(run)
    assert main(["submit", "--status", str(run)]) == 0
    assert "not submitted" in capsys.readouterr().out


def test_a_run_that_has_started_is_submitted_again_from_its_recipe_file(stand_in, capsys):
    """The run records lengths and capacity that the recipe file leaves open."""
    words, run = stand_in("0", "--dry-run")
    recipe = load_recipe(words[1])
    with contextlib.closing(RunFolder(check_inputs(recipe, on_this_host=False).resolved(recipe))):
        assert main(words) == 0
    assert f"{run}: optimizer.lr is " in refusal([*words, "optimizer.lr=0.5"], capsys)


def test_a_job_is_queued_again_until_its_bound(stand_in, capsys, monkeypatch):
    """Also: the job gets no other variables of this shell, and a run has one job at a time."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    words, run = stand_in("wait 75 0", "--max-requeues", "1")
    [job] = submitted(words, capsys)
    [first] = wait_for(lambda: starts(run))
    assert first["environment"]["NCCL_DEBUG"] == "WARN x" and "HF_TOKEN" not in first["environment"]
    assert first["argv"][:2] == ["train", "--supervise"]
    assert float(first["environment"]["MSRL_HELD_SINCE"]) > 0, "from when on the ledger charges"
    assert main(words) == 2
    assert f"the run has job {job} already, RUNNING" in capsys.readouterr().err
    main(["submit", "--status", str(run)])
    said = capsys.readouterr().out
    assert f"job {job}: RUNNING (node" in said and "not started yet" in said
    slurm._run("scancel", "--batch", "--signal=USR1", job)
    assert wait_for_end(job) == "FAILED"
    assert len(starts(run)) == 2
    folders = [run / f"slurm/{job}.{n}" for n in (0, 1)]
    assert [(folder / "controller.exit").read_text() for folder in folders] == ["75\n", "75\n"]
    output = (run / f"slurm/{job}.out").read_text()
    assert "its bound: go on with: sbatch" in output
    assert main(["submit", "--status", str(run)]) == 0
    assert f"job {job}: FAILED, queued again 1 of at most 1 times" in capsys.readouterr().out


def array_of(tmp_path, stand_in, **ends):
    """Words that submit runs which end like this, two at a time."""
    folder = tmp_path / "study"
    folder.mkdir()
    for name, end in ends.items():
        words, _ = stand_in(end, name=name)
        (tmp_path / f"{name}.yaml").rename(folder / f"{name}.yaml")
    return ["submit", "--array", str(folder), "--throttle", "2", *words[2:]]


def test_an_array_goes_on_without_the_run_that_fails(stand_in, tmp_path, capsys):
    [job] = submitted(array_of(tmp_path, stand_in, a="finish", b="3", c="finish", d="finish"), capsys)
    states = [wait_for_end(f"{job}_{n}") for n in range(4)]
    assert states == ["COMPLETED", "FAILED", "COMPLETED", "COMPLETED"]
    assert main(["submit", "--status", str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert f"job {job}_1: FAILED" in said and "last error: controller: exit code 3: the stand-in fails with 3" in said
    assert main(["submit", "--status", str(tmp_path / "c")]) == 0
    assert "finished: all steps are made" in capsys.readouterr().out


def test_a_saved_run_of_an_array_is_queued_again_alone(stand_in, tmp_path, capsys):
    """Also the last one, whose SLURM_JOB_ID is the array's."""
    words = array_of(tmp_path, stand_in, a="wait finish", b="wait finish")
    [job] = submitted([*words, "--gpus", "0"], capsys)
    [first, last] = [wait_for(lambda name=name: starts(tmp_path / name))[0]["environment"] for name in ("a", "b")]
    assert first["SLURM_JOB_ID"] != last["SLURM_JOB_ID"] == job
    subprocess.run(["scancel", "--batch", "--signal=USR1", f"{job}_1"], check=True)
    assert wait_for_end(f"{job}_1") == "COMPLETED"
    assert slurm.last_state(f"{job}_0") == "RUNNING"
    assert [len(starts(tmp_path / name)) for name in ("a", "b")] == [1, 2]
    slurm.cancel([f"{job}_0"])
    assert wait_for_end(f"{job}_0") == "CANCELLED"


def test_the_jobs_of_a_chain_after_the_end_do_not_start_the_program(stand_in, capsys):
    words, run = stand_in("75 finish 0", "--chain", "--max-requeues", "2")
    jobs = submitted(words, capsys)
    assert [wait_for_end(job) for job in jobs] == ["FAILED", "COMPLETED", "COMPLETED"]
    assert len(starts(run)) == 2


def test_a_hung_controller_is_ended_and_its_job_goes_on(tmp_path, tiny, on_login_node, capsys):
    program, recipe = WITH_STAND_INS.with_name("run_with_a_hung_loop.py"), tmp_path / "r.yaml"
    site = write_site(tmp_path / "site.yaml", program, environment={"PYTHONPATH": str(ROOT)})
    run = write_recipe(recipe, tiny, output_dir=tmp_path, checkpoint={"every_steps": 1})
    [job] = submitted(["submit", str(recipe), *JOB, "--site", site, "--gpus", "0"], capsys)
    wait_for(lambda: steps(run) >= 1, 600)
    said = status(run, capsys)
    assert "last heartbeat 0:00:" in said and "s late in the last batch" in said
    assert wait_for_end(job, 600) == "COMPLETED", (run / f"slurm/{job}.out").read_text()
    assert (run / "hung").exists() and "last heartbeat" not in status(run, capsys)
    [log] = (run / "slurm").glob("*/controller.log")
    text = log.read_text()
    assert "the event loop stood still for 10 s; the process is killed; stacks of threads:" in text
    assert "in hang_once\n" in text and "the run was killed by SIGKILL: restart 1 of at most 3" in text
    assert [row["incarnation"] for row in rows(run / "attempts.jsonl")] == [f"{job}.0", f"{job}.0-1"]
    made = rows(run / "metrics.jsonl")
    assert [row["step"] for row in made] == list(range(1, 7))
    assert all(0 <= row["loop_lag_seconds"] < 10 for row in made)

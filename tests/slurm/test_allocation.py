"""What a job asks for, what is refused before, and what the status says about its nodes: without a cluster."""

import os
from dataclasses import fields

import pytest
from recipe_files import ROOT

from megatron_scalerl.cluster.allocation import Allocation, Request, allocate, check_plan
from megatron_scalerl.cluster.cluster import Partition
from megatron_scalerl.cluster.slurm_status import attempts, ledger_total, seconds_left, unfit_nodes
from megatron_scalerl.recipe.file import dump_recipe, load_recipe

H100 = Partition(name="gpu", gpus=8, cpus=96, nodes=10, gpu_type="h100", limit_s=None)
CPUS = Partition(name="cpu", gpus=0, cpus=32, nodes=10, gpu_type=None, limit_s=None)


UNSAID = dict.fromkeys(field.name for field in fields(Request))


def asked(nodes=1, **options):
    return Request(**UNSAID | {"nodes": nodes} | options)


def recipe_like(ranks, engines, devices):
    """A recipe whose layout is not checked."""
    engine = {"count": engines, "devices_per_engine": devices}
    return BASE.with_settings(trainer={"world_size": ranks}, engine=engine)


BASE = load_recipe(ROOT / "recipes/tiny_cpu.yaml", ["weights.transport=auto"])


@pytest.mark.parametrize(
    "fleet, partition, wanted, found",
    [
        ((2, 1, 1), H100, asked(), Allocation(nodes=1, gpus=3, slots=None, cpus=36)),
        ((4, 4, 1), H100, asked(), Allocation(nodes=1, gpus=8, slots=None, cpus=None)),
        ((16, 8, 2), H100, asked(4), Allocation(nodes=4, gpus=8, slots=8, cpus=None)),
        ((4, 2, 2), H100, asked(2, gpus_per_node=4), Allocation(nodes=2, gpus=4, slots=4, cpus=48)),
        ((2, 3, 1), CPUS, asked(2, slots=4), Allocation(nodes=2, gpus=0, slots=4, cpus=10)),
        ((2, 2, 1), H100, asked(4, gpus_per_node=0, slots=1, cpus=3), Allocation(nodes=4, gpus=0, slots=1, cpus=3)),
    ],
)
def test_nodes_are_alike_and_filled(fleet, partition, wanted, found):
    assert allocate([recipe_like(*fleet)], partition, wanted) == found


@pytest.mark.parametrize(
    "fleet, partition, wanted, said",
    [
        ((16, 8, 2), H100, asked(3), "--nodes: 3 is too few: 16 trainer ranks and 8 engines of 2"),
        ((16, 8, 2), H100, asked(5), "--nodes: 5 is too many: trainer and engines fill 4 nodes of 8 devices"),
        ((16, 8, 2), H100, asked(11), "--nodes: 11 is out of range: partition gpu has 10 nodes"),
        ((16, 8, 2), H100, asked(), "--gpus-per-node: 32 is out of range: a node of gpu has 8 GPUs, and ranks and "
         "engines of tiny_cpu take 32; --nodes 4 would be enough"),
        ((2, 2, 4), H100, asked(2, gpus_per_node=2), "engine.devices_per_engine: 4 is more than the 2 devices"),
        ((2, 2, 1), H100, asked(2, gpus_per_node=9), "--gpus-per-node: 9 is out of range: a node of gpu has 8"),
        ((2, 2, 1), H100, asked(2, gpus_per_node=-1), "--gpus-per-node: -1 is out of range: a node of gpu has 8"),
        ((2, 2, 1), H100, asked(2, gpus_per_node=2, slots=2), "--slots is for a run on CPUs, but this run takes "
         "2 GPUs of a node"),
        ((2, 2, 1), CPUS, asked(2), "--slots is missing"),
        ((2, 2, 1), CPUS, asked(slots=2), "--slots requires --nodes of at least 2"),
        ((2, 2, 1), CPUS, asked(2, slots=2, cpus=33), "--cpus: 33 is out of range: a node of"),
        ((2, 2, 1), H100, asked(gpus_per_node=2), "--gpus-per-node: 2 is too few: ranks and engines take 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(fleet, partition, wanted, said):
    with pytest.raises(ValueError) as refused:
        allocate([recipe_like(*fleet)], partition, wanted)
    assert said in str(refused.value)


def test_an_array_gets_what_its_largest_run_needs():
    found = allocate([recipe_like(2, 2, 1), recipe_like(8, 4, 1)], H100, asked(3, gpus_per_node=4))
    assert (found.nodes, found.slots) == (3, 4)


@pytest.mark.slow
def test_the_planner_is_asked_where_it_knows_the_gpus(tmp_path):
    file = ROOT / "recipes/scalerl_llama3_8b.yaml"
    fits = load_recipe(file)
    assert check_plan(fits, str(file), H100, 0) == "skipped without GPUs"
    other = Partition(name="old", gpus=8, cpus=96, nodes=10, gpu_type="v100", limit_s=None)
    assert "skipped: Slurm's GPU type of old is v100" in check_plan(fits, str(file), other, 8)
    assert "skipped" not in check_plan(fits, str(file), H100, 8)
    tight = load_recipe(file, ["trainer.micro_batch_tokens=2000000"])
    with pytest.raises(ValueError, match=r"plan --check: .* GiB are missing; try a larger .*size$"):
        check_plan(tight, str(file), H100, 8)


def test_the_ledger_is_summed_up_to_its_last_heartbeat(tmp_path):
    run = tmp_path / "r"
    assert ledger_total(run).hours == 0
    run.mkdir()
    rows = ['{"unit": "gpu_hours"}', '{"role": "trainer", "hours": 1.5}', '{"role": "lost", "hours": 0.25}',
            '{"heartbeat": 3600, "devices": 2}']  # fmt: skip
    (run / "ledger.jsonl").write_text("\n".join(rows) + "\n")
    assert (ledger_total(run).hours, ledger_total(run).unit) == (3.75, "GPU-hours")
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe_like(3, 1, 1).model_copy(update={"name": "r", "output_dir": str(tmp_path)})))
    assert (seconds_left(file, 4.75), seconds_left(file, 3.0)) == (900, 0)


def test_attempts_are_those_since_the_last_submission_in_order(tmp_path):
    script = tmp_path / "slurm/job.sbatch"
    assert attempts(tmp_path) == []
    for when, name in ((5, "6.0"), (30, "7.10"), (20, "7.9")):
        file = tmp_path / "slurm" / name / "started"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (when, when))
    (tmp_path / "slurm/8.0").mkdir()  # the run was finished, and the job ended at once
    script.touch()
    os.utime(script, (10, 10))
    assert [folder.name for folder in attempts(tmp_path)] == ["7.9", "7.10"]
    assert unfit_nodes(tmp_path / "slurm/7.9") == {}
    (tmp_path / "slurm/7.9/nodes").mkdir()
    (tmp_path / "slurm/7.9/nodes/bad").write_text("n1\tGPUs: none\nn2\ttoo\tlate\n")
    assert unfit_nodes(tmp_path / "slurm/7.9") == {"n1": "GPUs: none", "n2": "too\tlate"}

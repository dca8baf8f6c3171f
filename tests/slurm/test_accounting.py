"""What the ledger charges, against what Slurm's accounting does: real trainer ranks, stand-in engines."""

import re
import subprocess

import pytest
from slurm_runs import JOB, WITH_STAND_INS, steps, wait_for, wait_for_end, write_recipe, write_site

from megatron_scalerl.__main__ import main
from megatron_scalerl.cluster import cluster as slurm
from megatron_scalerl.cluster.slurm_status import spent

pytestmark = [pytest.mark.slow, pytest.mark.full]
GPUS = 3
"""Of the job: two trainer ranks and an engine, which run on CPUs here."""
DELAY_S = 30
"""Between the job's start and the controller's: what is allowed to be uncharged is less."""


@pytest.fixture
def cluster(new_cluster):
    with new_cluster("node1", "node2", accounting=True) as made:
        yield made


def accounted(cluster, job):
    """Seconds of each attempt of a job with the GPUs that it held, as sacct says; none before the job's end."""
    words = ["-X", "-P", "-n", "--duplicates", "-j", job, "-o", "State,ElapsedRaw,AllocTRES"]
    lines = [line.split("|") for line in cluster.ask("sacct", *words).splitlines()]
    if [line[0] for line in lines] != ["REQUEUED", "COMPLETED"]:
        return None
    return [(int(seconds), int(re.search(r"gres/gpu=(\d+)", held)[1])) for _, seconds, held in lines]


def test_the_ledger_charges_what_the_job_held_but_for_its_last_seconds(
    cluster, tmp_path, tiny, on_login_node, capsys
):
    environment = {"PYTHONPATH": str(WITH_STAND_INS.parents[2])}
    site = write_site(tmp_path / "site.yaml", WITH_STAND_INS, environment=environment)
    run = write_recipe(tmp_path / "r.yaml", tiny, output_dir=tmp_path)
    words = ["submit", str(tmp_path / "r.yaml"), *JOB, "--site", site, "--gpus", str(GPUS)]
    assert main([*words, "--dry-run"]) == 0
    script = run / "slurm" / "job.sbatch"
    before, line, after = script.read_text().partition("\nfor look in ")
    assert line
    script.write_text(f"{before}\nsleep {DELAY_S}{line}{after}")
    job = cluster.ask("sbatch", "--parsable", str(script)).strip()
    wait_for(lambda: steps(run) >= 2, "two steps")
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    assert wait_for_end(slurm.last_state, job) == "COMPLETED", (run / "slurm" / f"{job}.out").read_text()
    held = wait_for(lambda: accounted(cluster, job), "both attempts in sacct")
    assert [gpus for _, gpus in held] == [GPUS, GPUS]
    charged, unit = spent(run).hours * 3600 / GPUS, spent(run).unit
    total = sum(seconds for seconds, _ in held)
    assert total >= DELAY_S * len(held)
    with capsys.disabled():
        print(f"\nsacct: {GPUS} GPUs for {total} s in two attempts; ledger: {charged:.1f} s ({unit} x 3600 / {GPUS})")
    # uncharged: the ends of both attempts, from the controller's last charge to the job's end
    assert total - 10 * len(held) < charged <= total + len(held), "sacct counts whole seconds"

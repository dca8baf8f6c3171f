"""Recipes for runs on the cluster of these tests, and waiting for their jobs."""

import re
import sys
import time
from pathlib import Path

import yaml
from recipe_files import ROOT

from megatron_scalerl.__main__ import main
from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.cluster import cluster

WITH_STAND_INS = ROOT / "tests/fakes/run_with_stand_ins.py"
STAND_IN_PROGRAM = Path(__file__).with_name("stand_in_program.py")
JOB = ["--partition", "gpu", "--time", "30", "--startup-seconds", "10", "--save-seconds", "5"]
TWO = ["--nodes", "2", "--gpus-per-node", "4"]
FLEET = ["trainer.world_size=4", "engine.count=4"]
"""Fills two nodes of four devices."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def write_recipe(path, tiny, *, name="r", output_dir, **changes):
    """A run of six steps at k = 0 with two trainer ranks and one stand-in engine; returns its folder."""
    data = yaml.safe_load((ROOT / "recipes/tiny_cpu.yaml").read_text())
    data |= {
        "name": name,
        "output_dir": str(output_dir),
        "steps": 6,
        "policy": {"path": str(tiny / "base_policy"), "dtype": "float32"},
        "prompts": {
            "path": str(tiny / "prompts.jsonl"),
            "held_out_path": str(tiny / "held_out.jsonl"),
            "max_prompt_tokens": 32,
        },
        "rollouts": {"groups_per_batch": 4, "group_size": 4, "max_in_flight": 16, "max_staleness_steps": 0},
        "validation": {"every_steps": 3, "prompts": 10, "generations": 2},
        "checkpoint": {"every_steps": 0},
        "optimizer": {"warmup_steps": 1, "lr": 1e-5},
        "weights": {"probe_tolerance": 1e9, "probe_every": 0},
        "trainer": {"world_size": 2, "micro_batch_tokens": 512},
        "filters": {"zero_variance": False},
    }
    data["interruption"]["enabled"] = False
    path.write_text(yaml.safe_dump(data | changes))
    return Path(output_dir) / name


def starts(run):
    """What the stand-in program noted at each start."""
    return read_jsonl(run / "slurm/starts")


def nodes_of(start):
    """The nodes of the allocation in which the stand-in started."""
    return hostnames(start["environment"]["SLURM_JOB_NODELIST"])


def held_by(job):
    """The nodes that a job holds now."""
    return hostnames(re.search(r" NodeList=(\S*)", cluster._job_description(job))[1])


def hostnames(nodes):
    """The names in Slurm's short form, such as node[1-3]."""
    return cluster._ask("scontrol", "show", "hostnames", nodes).split()


def output_of(run, job):
    """What the job's script has said so far."""
    file = run / f"slurm/{job}.out"
    return file.read_text() if file.exists() else ""


def write_site(path, program, **more):
    """A site file whose program is one of Python."""
    path.write_text(yaml.safe_dump({"program": [sys.executable, str(program)], **more}))
    return str(path)


def wait_for(condition, seconds=300.0):
    """Return the first result of `condition` that counts as true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def wait_for_end(job, seconds=300.0):
    """The final state of a job."""
    return wait_for(lambda: (state := cluster.last_state(job)) in ENDED and state, seconds)


def check_completed(run, job, seconds=300.0):
    assert wait_for_end(job, seconds) == "COMPLETED", output_of(run, job)


def submitted(words, capsys):
    """Ids of the submitted jobs."""
    assert main(words) == 0
    return re.search(r"submitted: job ([\d, ]+);", capsys.readouterr().out)[1].split(", ")


def rows(file):
    """The lines of a file of a run, none where it is not there yet."""
    return read_jsonl(file) if file.exists() else []


def steps(folder):
    """Optimizer steps of a run so far."""
    return max((row["step"] for row in rows(folder / "metrics.jsonl")), default=0)


def status(run, capsys):
    """The lines of `submit --status`."""
    assert main(["submit", "--status", str(run)]) == 0
    return capsys.readouterr().out

"""Controller, trainer ranks and engines in containers on several nodes, on a real Slurm.

bubblewrap (apt-get install bubblewrap) is a container without an image: this machine's files, but no folder of the
cluster, and no programs of Slurm. The options of pyxis: test_job_script.py.
"""

import shutil
import sys

import pytest
import yaml
from slurm_runs import JOB, ROOT, check_completed, steps, submitted, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NODES = ["--nodes", "3", "--gpus-per-node", "0", "--slots", "1"]
SLURMS_OWN = [shutil.which(name) for name in ("srun", "scontrol")]


def bubblewrap(*folders):
    """The command in front of a program: read-only but for the run's folder, and without Slurm."""
    shown = [word for folder in folders for word in ("--ro-bind", str(folder), str(folder))]
    hidden = [word for program in SLURMS_OWN for word in ("--ro-bind", "/dev/null", program)]
    return [
        *("bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
        *(*shown, "--bind", "{run}", "{run}", *hidden, "--chdir", "{cwd}", "--"),
    ]


def test_a_run_of_three_nodes_in_containers(tmp_path, tiny, on_login_node, capsys):
    """A real rank on each of two nodes, a real engine on the third; the check of the nodes is the real one, too."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap (apt-get install bubblewrap)")
    variables = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": "/tmp/cache"}
    site = {"program": [sys.executable, "-m", "megatron_scalerl"], "environment": variables}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site | {"container": bubblewrap(tiny, ROOT)}))
    run = write_recipe(tmp_path / "r.yaml", tiny, output_dir=tmp_path, steps=2, validation={"every_steps": 0})
    words = ["submit", str(tmp_path / "r.yaml"), *JOB, *NODES, "--site", str(tmp_path / "site.yaml")]
    [job] = submitted(words, capsys)
    check_completed(run, job, 800)
    assert steps(run) == 2
    assert list((run / f"slurm/{job}.0/outside").glob("asked.*")) == [], "every use of srun has ended"

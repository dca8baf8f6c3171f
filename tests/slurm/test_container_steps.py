"""Controller, trainer ranks and engines in containers on several nodes, on a real Slurm.

bubblewrap (apt-get install bubblewrap) is a container without an image: this machine's files, but no folder of the
cluster, and no programs of Slurm. Of pyxis the options alone are tried: its `srun` is a stand-in.
"""

import os
import shutil
import sys

import pytest
import yaml
from slurm_runs import JOB, ROOT, output_of, steps, submitted, wait_for_end, write_recipe

from megatron_scalerl.cluster import cluster as slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NODES = ["--nodes", "3", "--gpus-per-node", "0", "--slots", "1"]
STAND_IN_SRUN = ROOT / "tests/fakes/srun_without_pyxis"
SLURMS_OWN = [shutil.which(name) for name in ("srun", "scontrol")]


def bubblewrap(*folders):
    """The command in front of a program: read-only but for the run's folder, and without Slurm."""
    shown = [word for folder in folders for word in ("--ro-bind", str(folder), str(folder))]
    hidden = [word for program in SLURMS_OWN for word in ("--ro-bind", "/dev/null", program)]
    return [
        *("bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
        *(*shown, "--bind", "{run}", "{run}", *hidden, "--chdir", "{cwd}", "--"),
    ]


@pytest.mark.parametrize("kind", ["bubblewrap", pytest.param("options of pyxis", marks=pytest.mark.full)])
def test_a_run_of_three_nodes_in_containers(kind, tmp_path, tiny, on_login_node, monkeypatch, capsys):
    """A real rank on each of two nodes, a real engine on the third; the check of the nodes is the real one, too."""
    recorded = tmp_path / "srun"
    variables = {"PYTHONPATH": str(ROOT), "SRUN_WITHOUT_PYXIS": str(recorded), "XDG_CACHE_HOME": "/tmp/cache"}
    site = {"program": [sys.executable, "-m", "megatron_scalerl"], "environment": variables}
    if kind == "bubblewrap":
        if shutil.which("bwrap") is None:
            pytest.skip("needs bubblewrap (apt-get install bubblewrap)")
        site["container"] = bubblewrap(tiny, ROOT)
    else:
        monkeypatch.setenv("PATH", f"{STAND_IN_SRUN}:{os.environ['PATH']}")
        site |= {"container": "pyxis", "image": "/images/run.sqsh", "mounts": ["/data:/data"]}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    run = write_recipe(tmp_path / "r.yaml", tiny, output_dir=tmp_path, steps=2, validation={"every_steps": 0})
    words = ["submit", str(tmp_path / "r.yaml"), *JOB, *NODES, "--site", str(tmp_path / "site.yaml")]
    [job] = submitted(words, capsys)
    assert wait_for_end(slurm.last_state, job, 800) == "COMPLETED", output_of(run, job)
    assert steps(run) == 2
    assert list((run / f"slurm/{job}.0/outside").glob("asked.*")) == [], "every use of srun has ended"
    if kind == "bubblewrap":
        assert not recorded.exists()
        return
    calls = [call.rstrip("\0").split("\0") for call in recorded.read_text().split("\1\0") if call]
    outside = [words for words in calls if {"--job-name=watch", "rm", "make"} & set(words)]
    inside = [words for words in calls if words not in outside]
    assert len(outside) == 4 and not any("--container" in word for words in outside for word in words)
    local = f"/tmp/megatron-scalerl-{os.environ.get('USER', 'root')}"
    mounts = f"{ROOT}:{ROOT},/data:/data,{run}:{run},{local}:{local}"
    for words in inside:
        assert {"--container-image=/images/run.sqsh", f"--container-workdir={ROOT}", "--no-container-mount-home",
                f"--container-mounts={mounts}"} <= set(words)  # fmt: skip
    assert {node for words in inside for node in words if node.startswith("--nodelist=")} == {
        f"--nodelist=node{number}" for number in (1, 2, 3)
    }
    what = [" ".join(words) for words in inside]
    for program, count in (("doctor", 3), ("train --supervise", 1), ("agent trainer-", 1), ("agent engine-", 1)):
        assert sum(program in words for words in what) == count, what

"""A cluster for the tests of this folder, which are skipped where there can be none."""

import os

import pytest
from mini_cluster import MiniCluster, missing
from slurm_runs import JOB, ROOT, STAND_IN_PROGRAM, write_recipe, write_site

from megatron_scalerl.tiny.build import TinyArguments, build


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if (why := missing()) is not None:
        pytest.skip(why)
    made = MiniCluster(tmp_path_factory.mktemp("slurm") / "c", ("node1", "node2", "node3", "node4"))
    yield made
    made.close()


@pytest.fixture
def on_login_node(cluster, monkeypatch):
    """The cluster, whose client programs are on the path."""
    monkeypatch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
    return cluster


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    build(root, TinyArguments(seed=1, train_prompts=40, held_out=10, sft_examples=4))
    return root


@pytest.fixture
def stand_in(tmp_path, tiny, on_login_node):
    """Words of the command for a run whose program is a stand-in, and the run's folder."""

    def made(ends, *options, name="r", **changes):
        run = write_recipe(tmp_path / f"{name}.yaml", tiny, name=name, output_dir=tmp_path, **changes)
        (run / "slurm").mkdir(parents=True)
        (run / "slurm" / "ends").write_text(ends)
        variables = {"NCCL_DEBUG": "WARN x", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        site = write_site(tmp_path / "site.yaml", STAND_IN_PROGRAM, environment=variables)
        return ["submit", str(tmp_path / f"{name}.yaml"), *JOB, "--site", site, *options], run

    return made

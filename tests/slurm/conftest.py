"""A cluster for the tests of this folder, which are skipped where there can be none."""

import contextlib
import os

import pytest
from e2e.whole_runs import make_tiny
from mini_cluster import MiniCluster, missing
from slurm_runs import JOB, ROOT, STAND_IN_PROGRAM, write_recipe, write_site


@pytest.fixture(scope="session")
def new_cluster(tmp_path_factory):
    """`new_cluster(NODE, ..., silence_s=S)`: a context manager with a cluster of its own, for tests that break it."""

    @contextlib.contextmanager
    def made(*nodes, **options):
        if (why := missing()) is not None:
            pytest.skip(why)
        with contextlib.closing(MiniCluster(tmp_path_factory.mktemp("slurm") / "c", nodes, **options)) as cluster:
            yield cluster

    return made


@pytest.fixture(scope="session")
def cluster(new_cluster):
    """None of its nodes is given up while a test has cut it off."""
    with new_cluster("node1", "node2", "node3", "node4", silence_s=180) as made:
        yield made


@pytest.fixture
def on_login_node(cluster, monkeypatch):
    """The cluster, whose client programs are on the path. Its jobs find this checkout."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
    return cluster


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A policy after a short warm start, with its task, for runs with real engines."""
    return make_tiny(tmp_path_factory.mktemp("warm") / "dense", moe=False, sft_steps=80)


@pytest.fixture
def stand_in(tmp_path, tiny, on_login_node):
    """Words of the command for a run whose program is a stand-in, and the run's folder."""

    def made(ends, *options, name="r", **changes):
        run = write_recipe(tmp_path / f"{name}.yaml", tiny, name=name, output_dir=tmp_path, **changes)
        (run / "slurm").mkdir(parents=True)
        (run / "slurm/ends").write_text(ends)
        variables = {"NCCL_DEBUG": "WARN x", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        site = write_site(tmp_path / "site.yaml", STAND_IN_PROGRAM, environment=variables)
        return ["submit", str(tmp_path / f"{name}.yaml"), *JOB, "--site", site, *options], run

    return made

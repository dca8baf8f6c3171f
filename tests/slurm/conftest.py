"""A cluster for the tests of this folder, which are skipped where there can be none."""

import os

import pytest
from mini_cluster import MiniCluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if (why := missing()) is not None:
        pytest.skip(why)
    made = MiniCluster(tmp_path_factory.mktemp("slurm") / "c", ("node1", "node2"))
    yield made
    made.close()


@pytest.fixture
def on_login_node(cluster, monkeypatch):
    """The cluster, whose client programs are on the path."""
    monkeypatch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
    return cluster

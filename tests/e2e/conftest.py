"""Warm policies, made once a session."""

import pytest
from whole_runs import make_tiny


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "dense", moe=False, sft_steps=80)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "moe", moe=True, sft_steps=80)

"""Warm policies, made once for all workers."""

from functools import partial

import pytest
from shared_folders import made_once
from whole_runs import make_tiny


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory):
    return made_once(tmp_path_factory, "tiny_dense", partial(make_tiny, moe=False, sft_steps=80))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory):
    return made_once(tmp_path_factory, "tiny_moe", partial(make_tiny, moe=True, sft_steps=80))

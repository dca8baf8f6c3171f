"""What tests of several folders start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_scalerl.tiny.build import TinyArguments, build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tiny task with its policy; tests copy what they change."""
    folder = tmp_path_factory.mktemp("tiny_task") / "tiny"
    build(folder, TinyArguments(seed=1, train_prompts=100, held_out=20, sft_examples=32))
    return folder

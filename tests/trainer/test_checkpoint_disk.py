"""A disk that is full when the trainer writes a checkpoint, with Megatron's own writer."""

import os
import subprocess

import pytest
from random_policy import batches_of, random_samples

from megatron_scalerl.controller.train import _is_full
from megatron_scalerl.trainer import checkpoint
from megatron_scalerl.trainer.client import TrainerError


def test_a_full_disk_is_one_line_with_the_path_and_space_is_enough_to_go_on(new_trainer, tmp_path):
    """It was a traceback of every rank in each rank's log."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "none", tmp_path]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    trainer, path = new_trainer(), tmp_path / "checkpoints" / "step-1"
    try:
        path.parent.mkdir()
        trainer.step(batches_of(random_samples(1))[0])
        with pytest.raises(OSError) as full:
            checkpoint.save(path, trainer, {})
        assert str(full.value) == f"[Errno 28] No space left on device: '{path}'"
        error = TrainerError(f"trainer rank 0: OSError: {full.value}")
        assert not _is_full(error, tmp_path), "its text decides nothing"
        error.full = full.value.filename
        assert _is_full(error, tmp_path), "it is not started again"
        assert not _is_full(error, tmp_path / "another run")
        subprocess.run(["mount", "-o", "remount,size=8m", tmp_path], check=True)
        checkpoint.save(path, trainer, {})
        assert checkpoint.load(path, trainer) == {}
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)

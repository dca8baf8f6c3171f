"""Ranges and recorded memory on a GPU, as far as a CPU shows it: what PyTorch is asked for, and in which order."""

from contextlib import nullcontext

import pytest

from megatron_scalerl.distributed import device


def test_memory_is_written_after_an_exception_too(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(device, "HAVE_GPU", True)
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", asked.append)
    with pytest.raises(RuntimeError, match="out of memory"), device.recorded_memory(tmp_path / "memory"):
        raise RuntimeError("out of memory")
    assert asked == [{"max_entries": 100_000}, str(tmp_path / "memory"), {"enabled": None}]


@pytest.mark.parametrize("gpu", [False, True])
def test_a_range_is_in_nvtx_on_a_gpu_alone(monkeypatch, gpu):
    named = []
    monkeypatch.setattr(device, "HAVE_GPU", gpu)
    monkeypatch.setattr("torch.cuda.nvtx.range", lambda name: named.append(name) or nullcontext())
    with device.labelled("optimizer"):
        pass
    assert named == ["optimizer"] * gpu


def test_without_a_gpu_no_memory_is_recorded(tmp_path):
    with device.recorded_memory(tmp_path / "memory"):
        pass
    assert list(tmp_path.iterdir()) == []

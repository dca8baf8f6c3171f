"""Stopped and resumed equals uninterrupted, bit for bit, in one process."""

import contextlib
import gc
import os
import random
import threading

import numpy as np
import psutil
import pytest
import torch
from random_policy import batches_of, random_samples

from megatron_scalerl.checkpoints.commit import committed, latest
from megatron_scalerl.distributed.parallel import unwrap
from megatron_scalerl.trainer import shard_writer
from megatron_scalerl.trainer.checkpoint import begin_save, load, save

NOT_SHARDED = {"policy": {"dtype": "bfloat16"}, "megatron": {"ddp": {"use_distributed_optimizer": False}}}
MIXED = {"policy": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-2, "warmup_steps": 3}}


def steps(trainer, numbers):
    for number in numbers:
        [batch] = batches_of(random_samples(number), step=number)
        trainer.step(batch)


@pytest.fixture(scope="module")
def stepped(new_trainer):
    """A trainer that has made one step."""
    trainer = new_trainer()
    steps(trainer, [1])
    return trainer


def state(trainer):
    """Weights and everything the optimizer remembers, by name."""
    found = {f"weight {n}": p.detach().clone() for n, p in unwrap(trainer.chunks[0]).named_parameters()}
    for i, optimizer in enumerate(trainer.optimizer.chained_optimizers):
        for j, group in enumerate(optimizer.optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                found[f"main {i}.{j}.{k}"] = parameter.detach().clone()
                for name, value in optimizer.optimizer.state[parameter].items():
                    found[f"{name} {i}.{j}.{k}"] = torch.as_tensor(value).clone()
    return found


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(expected[n], found[n])] == []


@pytest.mark.parametrize(
    "sections, fused", [({}, False), (MIXED, False), (MIXED, True)], ids=["fp32", "bf16", "bf16 with fused AdamW"]
)
def test_resumed_equals_uninterrupted(new_trainer, tmp_path, monkeypatch, sections, fused):
    monkeypatch.setattr("megatron_scalerl.trainer.optimizer.HAVE_GPU", fused)
    trainer = new_trainer(**sections)
    steps(trainer, [1, 2])
    save(tmp_path / "step_000002", trainer, {"step": 2, "curriculum": ["a"]})
    saved = state(trainer)
    steps(trainer, [3, 4])
    resumed = new_trainer(**sections)
    assert load(tmp_path / "step_000002", resumed) == {"step": 2, "curriculum": ["a"]}
    assert resumed.steps_made == 2
    restored = state(resumed)
    check_equal(restored, saved)
    counters = {n: float(v) for n, v in restored.items() if n.startswith("step")}
    assert counters and set(counters.values()) == {2.0}
    steps(resumed, [3, 4])
    ours, theirs = state(trainer), state(resumed)
    check_equal(theirs, ours)
    assert {float(v) for n, v in theirs.items() if n.startswith("step")} == {4.0}
    assert any(not torch.equal(saved[n], ours[n]) for n in saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [MIXED, NOT_SHARDED], ids=["distributed optimizer", "none: tensors of their own"]
)
def test_an_asynchronous_save_has_the_state_at_its_begin(new_trainer, tmp_path, monkeypatch, sections):
    """The files are written only after two more steps; they are those of a synchronous save, byte for byte."""
    trainer, may_write = new_trainer(**sections), threading.Event()
    steps(trainer, [1, 2])
    save(tmp_path / "step_000001", trainer, {"step": 2})
    write = shard_writer._write

    def write_late(*arguments):
        assert may_write.wait(60) and gc.isenabled()
        write(*arguments)

    monkeypatch.setattr(shard_writer, "_write", write_late)
    saving = begin_save(tmp_path / "step_000002", trainer, {"step": 2})
    steps(trainer, [3, 4])
    assert saving.finish(wait=False) is None and not [*(tmp_path / "step_000002").glob("*.distcp")]
    assert [path.name for _, path in committed(tmp_path)] == ["step_000001"]
    fsync, collecting = os.fsync, []
    monkeypatch.setattr(
        "megatron.core.dist_checkpointing.strategies.filesystem_async.os.fsync",
        lambda number: (collecting.append(gc.isenabled()), fsync(number)),
    )
    may_write.set()
    assert saving.finish(wait=True) > 0
    assert collecting and all(collecting), "Python's garbage collection goes on beside the thread"
    written, expected = contents(tmp_path / "step_000002"), contents(tmp_path / "step_000001")
    assert written.keys() == expected.keys()
    index = (".metadata", "COMMIT")  # with the folder's name and an id of the save; with the digest of that
    assert [name for name in written if name not in index and written[name] != expected[name]] == []
    resumed = new_trainer(**sections)
    assert load(tmp_path / "step_000002", resumed) == {"step": 2}
    steps(resumed, [3, 4])
    check_equal(state(resumed), state(trainer))


def contents(folder):
    """Bytes of its files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("ours", [True, False])
def test_several_buckets_with_padding_between_them(new_trainer, tmp_path, monkeypatch, ours):
    """Where gradients are reduced during the backward pass there are buckets; Megatron's own way mixes parameters."""
    if not ours:
        monkeypatch.setattr("megatron_scalerl.trainer.checkpoint.gathered_with_few_copies", contextlib.nullcontext)
    sections = {"megatron": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 5000}}}
    trainer = new_trainer(**sections)
    [buffer] = trainer.chunks[0].buffers
    assert len(buffer.buckets) > 2 and any(b.numel_unpadded < b.grad_data.numel() for b in buffer.buckets[:-1])
    steps(trainer, [1, 2])
    save(tmp_path / "step_000002", trainer, {})
    saved = state(trainer)
    resumed = new_trainer(**sections)
    load(tmp_path / "step_000002", resumed)
    restored = state(resumed)
    assert (saved.keys() == restored.keys() and all(torch.equal(saved[n], restored[n]) for n in saved)) == ours


def test_generators_are_restored(stepped, tmp_path):
    save(tmp_path / "step_000001", stepped, {})
    expected = (random.random(), float(np.random.rand()), torch.rand(1).item())
    load(tmp_path / "step_000001", stepped)
    assert (random.random(), float(np.random.rand()), torch.rand(1).item()) == expected


@pytest.mark.slow
def test_saving_again_replaces_and_starts_no_process(stepped, tmp_path):
    before = set(psutil.Process().children(recursive=True))
    for number in (1, 2):
        save(tmp_path / "step_000001", stepped, {"attempt": number})
    assert set(psutil.Process().children(recursive=True)) <= before
    assert latest(tmp_path) == tmp_path / "step_000001"
    assert load(tmp_path / "step_000001", stepped) == {"attempt": 2}


def test_a_missing_shard_is_named_and_nothing_is_loaded(new_trainer, stepped, tmp_path):
    path = tmp_path / "step_000001"
    save(path, stepped, {})
    shard = next(path.glob("*.distcp"))
    shard.unlink()
    fresh = new_trainer()
    before = state(fresh)
    with pytest.raises(ValueError, match=f"{shard.name}: this file of the checkpoint is missing"):
        load(path, fresh)
    assert all(torch.equal(value, before[name]) for name, value in state(fresh).items())


WHOLE = {"megatron": {"ddp": {"use_distributed_optimizer": False}}}


@pytest.mark.parametrize(
    "saved, sections, said",
    [({}, WHOLE, "the trainer lacks optimizer.state.param."), (WHOLE, {}, "the checkpoint lacks optimizer.")],
    ids=["sharded", "whole"],
)
def test_a_checkpoint_of_another_optimizer_is_a_line_and_loads_nothing(new_trainer, tmp_path, saved, sections, said):
    trainer = new_trainer(**saved)
    steps(trainer, [1])
    path = tmp_path / "step_000001"
    save(path, trainer, {})
    other = new_trainer(**sections)
    before = [p.detach().clone() for p in unwrap(other.chunks[0]).parameters()]
    what = r"the checkpoint was saved with another policy or optimizer \(megatron.ddp.use_distributed_optimizer\)"
    with pytest.raises(ValueError, match=rf"^{path}: {what}: {said}\S+$"):
        load(path, other)
    assert all(map(torch.equal, before, unwrap(other.chunks[0]).parameters()))


def test_a_disk_that_refuses_ends_the_save_without_a_commit(stepped, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.core.dist_checkpointing.strategies.filesystem_async.os.fsync", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: .*step_000001"):
        save(tmp_path / "step_000001", stepped, {})
    assert latest(tmp_path) is None

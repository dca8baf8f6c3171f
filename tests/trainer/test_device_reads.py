"""What a GPU's host waits for, kept as lists: once for every micro-batch, once for every step.

Two views, neither of them a GPU. A step on the CPU, in which every read is counted by caller (real data, so
experts and the optimizer take part); and forward and backward on the meta device, where a read is an error.
docs/cuda.md has the same lists with what each costs on a GPU.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from device_reads import DeviceReads
from random_policy import batches_of, make_recipe, random_samples
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_scalerl.distributed.parallel import unwrap
from megatron_scalerl.trainer import step as step_module
from megatron_scalerl.trainer.step_metrics import StepMetrics
from megatron_scalerl.types import Batch

META = torch.device("meta")
SETTINGS = {
    "loss in chunks": {},
    "loss of sequences": {"loss": {"name": "gspo"}},
    "logits twice": {"trainer": {"loss_in_chunk": False}},
}
HOST_ONLY = {
    "item megatron_scalerl/logits/torch_backend.py:_logits": "only for a scale in host memory",
    "item megatron/core/optimizer/optimizer.py:step_with_ready_grads": "AdamW's own counters are host tensors",
}
"""Found on a CPU, and no read of a device on a GPU."""
A_STEP = {
    "item megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32": 1,
    "item megatron/core/utils.py:local_multi_tensor_l2_norm": 1,
    "tolist megatron_scalerl/trainer/step_metrics.py:reduced": 1,
}
EXPERTS = {
    "tolist megatron/core/transformer/moe/experts.py:forward": 1,
    "tolist megatron/core/transformer/moe/moe_utils.py:sort_chunks_by_idxs": 6,
}
"""In every layer with experts, without Transformer Engine's permutation and grouped products."""


def reads(trainer, batch, monkeypatch):
    counter = DeviceReads()
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "host_row", counter.on_host(step_module.host_row))
        with counter.counting() as found:
            trainer.step(batch)
    return Counter({key: count for key, count in found.items() if key not in HOST_ONLY})


def per_step_and_micro_batch(trainer, monkeypatch):
    """From steps of one and of three micro-batches, after a first one that makes what stays."""
    [batch] = batches_of(random_samples(1))
    [row] = batch.micro_batches
    trainer.step(batch)
    one, three = (reads(trainer, Batch(step=2, micro_batches=(row,) * n), monkeypatch) for n in (1, 3))
    extra = {key: three[key] - one[key] for key in three | one}
    assert all(count % 2 == 0 for count in extra.values()), extra
    each = {key: count // 2 for key, count in extra.items() if count}
    return {key: count - each.get(key, 0) for key, count in one.items() if count - each.get(key, 0)}, each


@pytest.mark.parametrize("name", SETTINGS)
def test_a_dense_policy_reads_nothing_back_per_micro_batch(name, new_trainer, monkeypatch):
    assert per_step_and_micro_batch(new_trainer(**SETTINGS[name]), monkeypatch) == (A_STEP, {})


def test_experts_read_their_counts_in_every_layer(new_trainer, tmp_path, monkeypatch):
    import random_policies

    random_policies.make("qwen3_moe", tmp_path)  # layer 1 of 4 is dense
    trainer = step_module.make_trainer(make_recipe(tmp_path), new_trainer().parallel)
    expected = {key: 3 * count for key, count in EXPERTS.items()}
    assert per_step_and_micro_batch(trainer, monkeypatch) == (A_STEP, expected)


class Copies(TorchDispatchMode):
    """Counts copies from the host to the meta device, by whether the host waits for them."""

    def __init__(self):
        super().__init__()
        self.waited, self.queued = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        copies = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        source = args[1] if func is torch.ops.aten.copy_.default else args[0] if copies else None
        if copies and out.device == META and source.device.type == "cpu" and source.dim():
            queued = bool((kwargs or {}).get("non_blocking", len(args) > 2 and args[2]))
            self.queued += queued
            self.waited += not queued
        return out


def on_meta(trainer, monkeypatch):
    """The trainer with its policy on the meta device; only its schedule can run then."""
    model = unwrap(trainer.chunks[0]).to(META)
    model.inv_freq = model.inv_freq.to(META)
    trainer.parallel = model.parallel = replace(trainer.parallel, device=META)
    monkeypatch.setattr(trainer._config, "finalize_model_grads_func", None)
    # There is no pinned memory without a GPU.
    monkeypatch.setattr("megatron_scalerl.trainer.staging._pinned", partial(torch.empty, dtype=torch.uint8))
    return trainer


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_forward_and_backward_run_where_a_read_is_an_error(name, backend, new_trainer, monkeypatch):
    """And a micro-batch is sent in one copy, which nobody waits for."""
    sections = {**SETTINGS[name], "trainer": {**SETTINGS[name].get("trainer", {}), "logit_backend": backend}}
    if backend == "cuda":
        no_kernels(monkeypatch)
    trainer = on_meta(new_trainer(**sections), monkeypatch)
    [batch] = batches_of(random_samples(2), micro_batch_tokens=64)
    count = len(batch.micro_batches)
    assert count > 1
    metrics = StepMetrics(META)
    with Copies() as copies:
        trainer._schedule(batch.micro_batches, partial(trainer._train_loss, metrics, count), train=True)
    assert (copies.queued, copies.waited) == (count, 0)
    gradients = [p.grad for p in unwrap(trainer.chunks[0]).parameters()]
    assert all(g is not None and g.device == META for g in gradients)


def no_kernels(monkeypatch):
    """Stands in for the Triton kernels, which write into tensors that are there: here nothing is written."""
    from megatron_scalerl.logits import cuda_backend, row_kernels

    monkeypatch.setattr(cuda_backend, "row_statistics", lambda *_: None)
    monkeypatch.setattr(cuda_backend, "logit_gradient", lambda *_, **__: None)
    monkeypatch.setattr(row_kernels, "compiled", lambda: False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_pytorch_sees_no_wait_on_a_gpu(name, new_trainer):
    """PyTorch's own check, which names the first operator that waits; it has not been run yet."""
    trainer = new_trainer(policy={"dtype": "bfloat16"}, **SETTINGS[name])
    [batch] = batches_of(random_samples(2), micro_batch_tokens=64)
    trainer.step(batch)  # compiles kernels
    metrics = StepMetrics(trainer.parallel.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = partial(trainer._train_loss, metrics, len(batch.micro_batches))
        trainer._schedule(batch.micro_batches, loss, train=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_counter_sees_what_it_is_for():
    """Each way to read a device, once."""
    counter = DeviceReads()
    values = torch.arange(4.0)
    with counter.counting() as found:
        float(values.sum())
        bool((values > 1).any())
        values.tolist()
        values.cpu()
        values[values > 1]
        values.masked_select(values > 1)
        (values > 1).nonzero()
        values.unique()
        values.repeat_interleave(torch.tensor([1, 2, 3, 4]))
        values[values > 1] = 0.0  # fills by the mask
        counter.on_host(values.tolist)()
    kinds = Counter(key.split(" elsewhere")[0] for key in found.elements())
    assert kinds == {
        "item": 2,
        "tolist": 1,
        "cpu": 1,
        "index by mask": 1,
        "masked_select": 1,
        "nonzero": 1,
        "unique": 1,
        "repeat_interleave": 1,
    }

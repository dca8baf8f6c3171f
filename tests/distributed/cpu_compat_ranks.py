"""For every CPU patch, on two ranks: what upstream does without it and with it."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from parity_ranks import recipe
from policy_rows import arguments

Probe = Callable[[str], Any]
PROBES = {}


def probe_all(path):
    """name -> (the error without that patch, the answer with all); `path` is a mixture-of-experts policy."""
    from megatron_scalerl.distributed import cpu_compat

    before = _fingerprint()
    found = {"names": (sorted(cpu_compat.PATCHES), sorted(PROBES))}
    for name, probe in PROBES.items():
        cpu_compat.uninstall()
        cpu_compat.install(without=[name])
        without = _error_of(probe, path)
        cpu_compat.uninstall()
        cpu_compat.install()
        found[name] = (without, probe(path))
    cpu_compat.uninstall()
    found["restored"] = _fingerprint() == before
    return found


def _fingerprint():
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    owners = (torch.cuda, torch.Tensor, mappings, token_dispatcher, DistributedOptimizer)
    names = (
        "current_device",
        "synchronize",
        "get_rng_state",
        "manual_seed",
        "type",
        "cuda",
        "torch",
        "maybe_move_tensor_to_cpu",
        "load_state_dict",
        "sharded_state_dict",
    )
    return [vars(owner).get(name) for owner in owners for name in names]


def _error_of(probe, path):
    try:
        probe(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _probe(function):
    PROBES[function.__name__] = function
    return function


def _source_has(module, text):
    """A global of torch that upstream calls too deep inside to reach here: upstream must still call it."""
    if text not in inspect.getsource(module):
        raise AssertionError(f"upstream {module.__name__} no longer says {text}")


@_probe
def current_device(path):
    from megatron.core.utils import GlobalMemoryBuffer

    return GlobalMemoryBuffer().get_tensor([2], torch.float32, "probe").device.type


@_probe
def rng_state(path):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_scalerl.distributed.device import seed_everything

    _build(path, optimizer=False)
    numbers = []
    for _ in range(2):
        seed_everything(7)
        outside = torch.get_rng_state()
        with get_cuda_rng_tracker().fork():
            numbers.append(torch.rand(3).tolist())
        assert torch.equal(outside, torch.get_rng_state())
    return numbers[0] == numbers[1]


@_probe
def device_literal(path):
    from megatron.core.transformer.utils import get_default_causal_mask

    from megatron_scalerl.distributed.cpu_compat import LITERAL_FILES, _core

    for name in LITERAL_FILES:
        source = inspect.getsource(_core(name)).replace("'", '"').replace(" ", "")
        assert 'device="cuda"' in source, f"upstream {name} has no literal any more"
    return get_default_causal_mask(2).tolist()


@_probe
def cuda_method(path):
    from megatron.core.models.common.language_module.language_module import LanguageModule

    _source_has(inspect.getmodule(LanguageModule), "weight.data.cuda()")
    return torch.ones(2).cuda().tolist()


@_probe
def type_name(path):
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 4.0)
    clip_grad_by_total_norm_fp32([parameter], 1.0, 4.0)
    return round(parameter.grad.item(), 4)


@_probe
def synchronize(path):
    from megatron.core.pipeline_parallel import p2p_communication

    _source_has(p2p_communication, "torch.cuda.synchronize()")
    return torch.cuda.synchronize()


@_probe
def streams(path):
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None
    return _forward(path)


@_probe
def router_gemm(path):
    return _forward(path)


@_probe
def router_not_compiled(path):
    from megatron.core.transformer.moe.router import TopKRouter

    assert not hasattr(TopKRouter._apply_expert_bias, "_torchdynamo_orig_callable"), "goes through torch.compile"
    return _forward(path)


@_probe
def split_sizes(path):
    return _forward(path, expert_model_parallel_size=2)


@_probe
def uneven_gather(path):
    import torch.distributed as dist
    from megatron.core.tensor_parallel.mappings import _gather_along_first_dim

    rank = dist.get_rank()
    rows = torch.full((rank + 1, 1), float(rank))
    return _gather_along_first_dim(rows, dist.group.WORLD, output_split_sizes=[1, 2]).flatten().tolist()


@_probe
def adamw_state_before_first_step(path):
    chunks, optimizer = _build(path)
    inner = chunks[0].module
    rates = [group["lr"] for group in optimizer.param_groups]
    before = [parameter.clone() for parameter in inner.parameters()]
    metadata = dict(
        distrib_optim_sharding_type="fully_reshardable", distrib_optim_fully_reshardable_mem_efficient=False
    )
    optimizer.sharded_state_dict(inner.sharded_state_dict(), is_loading=True, metadata=metadata)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, inner.parameters()))
    return unchanged and rates == [group["lr"] for group in optimizer.param_groups]


@_probe
def adamw_step_of_loaded_state(path):
    chunks, optimizer = _build(path)
    _train(chunks, optimizer)
    sharded = optimizer.chained_optimizers[0]
    parameter = next(iter(sharded.model_param_group_index_map))
    group, order = sharded.model_param_group_index_map[parameter]
    state = sharded.optimizer.state[sharded.optimizer.param_groups[group]["params"][order]]
    main = sharded.optimizer.param_groups[group]["params"][order]
    saved = {"param": main.detach().clone(), "exp_avg": state["exp_avg"] + 1.0, "exp_avg_sq": state["exp_avg_sq"] + 2}
    with torch.no_grad():
        sharded._set_main_param_and_optimizer_states(parameter, saved)
    return torch.equal(state["exp_avg"], saved["exp_avg"]) and state["step"].item() == 1


@_probe
def adamw_step_per_parameter(path):
    chunks, optimizer = _build(path)
    _train(chunks, optimizer)
    for sharded in optimizer.chained_optimizers:
        sharded.load_state_dict(sharded.state_dict())
    _train(chunks, optimizer)
    steps = {state["step"].item() for part in optimizer.chained_optimizers for state in part.optimizer.state.values()}
    assert steps == {2.0}, f"after two steps parameters have counted {sorted(steps)}"
    return True


def _build(path, *, optimizer=True, **layout):
    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.trainer.optimizer import build_optimizer
    from megatron_scalerl.trainer.ranks import init_parallel

    shutdown_parallel(keep_world=True)  # of the model before
    settings = recipe(path, int(os.environ["WORLD_SIZE"]), layout)
    chunks = build_policy(path, settings, init_parallel(settings))
    return chunks, build_optimizer(chunks, settings) if optimizer else None


def _forward(path, **layout):
    chunks, _ = _build(path, optimizer=False, **layout)
    return bool(torch.isfinite(_row_through(chunks)).all())


def _row_through(chunks):
    tokens = torch.arange(12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    row = {"tokens": tokens[None], "position_ids": positions[None], "targets": tokens}
    return chunks[0](**arguments(chunks[0], row | {"cu_seqlens": torch.tensor([0, 5, 12])}))


def _train(chunks, optimizer):
    chunks[0].zero_grad_buffer()
    optimizer.zero_grad()
    _row_through(chunks)[0].sum().backward()
    chunks[0].finish_grad_sync()
    optimizer.step()

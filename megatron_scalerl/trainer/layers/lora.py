"""Adapters (LoRA) beside Megatron's parallel linear layers, for every parallel layout without approximation.

The life of an adapter: `with_lora` adds adapters to the layers' classes; `fill_adapters` gives every rank its
shards of the same factors; a layer adds scale B (A x) to its result; gradients are reduced like all gradients.

One factor of a pair is sharded like the weight, the second factor is whole on every tensor-parallel rank
(`models.adapters`). Ranks exchange A x alone, which has policy.lora.rank numbers per token. The gradient of a whole
factor is

    complete on each rank           without sequence parallelism
    a sum over the ranks' tokens    with sequence parallelism: Megatron sums as for norms (`sequence_parallel`)
    a sum over the ranks' columns   in experts: a layer gets all tokens on each rank, and Megatron exchanges data only
                                    outside of the layer. Here the adapter's backward pass computes this sum

PyTorch computes the factors' gradients, and DDP adds them to its buffers after these sums. Transformer Engine's fused
accumulation would add a gradient without the sum.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor

from megatron_scalerl.distributed.parallel import Parallel
from megatron_scalerl.models.adapters import PROJECTIONS
from megatron_scalerl.models.family import Family, Index
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.sections import LoraSection
from megatron_scalerl.trainer.adapter_folder import adapter_reader
from megatron_scalerl.weights.source import fill

_BY_ROWS = ("linear_proj", "linear_fc2")
"""Linear layers whose inputs tensor-parallel ranks divide. In all other linear layers ranks divide the outputs."""
_EXCHANGES: dict[tuple[bool, bool], Callable[..., Tensor]] = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}
"""(whether ranks divide the layer's inputs, whether sequence parallelism is on) -> collective on A x.

The backward pass runs the reverse collective."""


class Adapters(torch.nn.Module):
    """The adapters of one linear layer.

    name: Megatron's name of the layer. inputs, outputs: of all tensor-parallel ranks in `group`. weight: the layer's
    weight. The adapters are a separate module: Megatron's hooks that wait for gathered parameters run at a module's
    call.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        config: TransformerConfig,
        lora: LoraSection,
        group: Any,
        is_expert: bool,
        weight: Tensor,
    ):
        super().__init__()
        self.group = group
        self.rank = lora.rank
        self.scale = lora.alpha / lora.rank
        by_rows = name in _BY_ROWS
        sequence_parallel = config.sequence_parallel and not is_expert
        self.sums_gradients = is_expert and group.size() > 1
        self.bypass = False
        """True while the layer computes without adapters."""
        self.exchange: Callable[..., Tensor] | None = None
        if group.size() > 1 and not is_expert:
            self.exchange = _EXCHANGES[by_rows, sequence_parallel]
        projections = PROJECTIONS[name]
        sizes = [outputs // len(projections)] * len(projections)
        self.groups = 1
        if name == "linear_qkv":
            heads = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
            sizes = [count * config.kv_channels for count in heads]
            self.groups = config.num_query_groups // group.size()
        if by_rows:
            inputs //= group.size()
        else:
            sizes = [size // group.size() for size in sizes]
        self.widths = [size // self.groups for size in sizes]
        """Number of outputs of each projection in one group.

        The layer's outputs are `groups` groups, and each group has outputs of all projections."""
        self.targets = {projection: projection in lora.targets for projection in projections}
        """Projection of the layer -> whether the projection has an adapter."""
        self.sharded: dict[str, int] = {}
        """Name of a sharded factor -> axis along which ranks divide it."""
        for projection, size in zip(projections, sizes):
            if not self.targets[projection]:
                continue
            self.sharded[f"{projection}_{'A' if by_rows else 'B'}"] = int(by_rows)
            for factor, shape in (("A", (self.rank, inputs)), ("B", (size, self.rank))):
                self._register(f"{projection}_{factor}", shape, weight, sequence_parallel)

    def _register(self, name: str, shape: tuple[int, int], weight: Tensor, sequence_parallel: bool) -> None:
        parameter: Any = torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
        # Megatron's `allreduce` is False for experts whose data-parallel ranks differ from the dense layers' ranks.
        parameter.allreduce = getattr(weight, "allreduce", True)
        if name in self.sharded:
            set_tensor_model_parallel_attributes(parameter, True, self.sharded[name], 1)
        else:
            parameter.sequence_parallel = sequence_parallel
        self.register_parameter(name, parameter)

    def forward(self, x: Tensor, result: Tensor) -> Tensor:
        """The layer's `result` for x plus the adapters' outputs."""
        if not self.sharded or self.bypass:
            return result
        a_x = F.linear(x, torch.cat(self._factors("A"))) * self.scale
        if self.exchange is not None:
            a_x = self.exchange(a_x, group=self.group)
        outputs = [F.linear(part, b) for part, b in zip(a_x.split(self.rank, dim=-1), self._factors("B"))]
        return self._plus(result, outputs)

    def merged(self, weight: Tensor) -> Tensor:
        """`weight` plus the adapters' scaled products B A, computed in fp32. Ranks exchange nothing."""
        pairs = zip(self._factors("A"), self._factors("B"))
        products = [self.scale * (a.float().t() @ b.float().t()) for a, b in pairs]
        return self._plus(weight.float().t(), products).t().to(weight.dtype)

    def _factors(self, factor: str) -> list[Tensor]:
        """The factors A or B, as `factor` says, of all projections that have an adapter."""
        factors = []
        for name in [f"{projection}_{factor}" for projection, target in self.targets.items() if target]:
            parameter = getattr(self, name)
            if self.sums_gradients and name not in self.sharded:
                parameter = copy_to_tensor_model_parallel_region(parameter, group=self.group)
            factors.append(parameter)
        return factors

    def _plus(self, result: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """`result` [..., outputs of the layer] plus the adapters' `outputs`, each added to its projection's part."""
        target_outputs = iter(outputs)
        parts = []
        for part, target in zip(
            result.unflatten(-1, (self.groups, -1)).split(self.widths, -1), self.targets.values()
        ):
            if target:
                part = part + next(target_outputs).unflatten(-1, (self.groups, -1))
            parts.append(part)
        return torch.cat(parts, dim=-1).flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The factors as Megatron's sharded tensors, for a checkpoint."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            self.sharded,
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )


@contextlib.contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Context in which a model computes without its adapters."""
    adapters = [module for module in model.modules() if isinstance(module, Adapters)]
    for module in adapters:
        module.bypass = True
    try:
        yield
    finally:
        for module in adapters:
            module.bypass = False


def with_adapters(linear: type, lora: LoraSection) -> type:
    """A subclass of the parallel linear layer `linear` whose result includes adapters."""

    class WithAdapters(linear):  # type: ignore[misc]
        def __init__(
            self,
            input_size: int,
            output_size: int,
            *,
            config: TransformerConfig,
            tp_comm_buffer_name: str,
            tp_group: Any = None,
            is_expert: bool = False,
            **keywords: Any,
        ):
            group = get_tensor_model_parallel_group_if_none(tp_group, is_expert=is_expert)
            options = dict(config=config, is_expert=is_expert)
            super().__init__(
                input_size,
                output_size,
                tp_comm_buffer_name=tp_comm_buffer_name,
                tp_group=group,
                **options,
                **keywords,
            )
            # Megatron passes a layer's name (qkv, proj, fc1, fc2) only as the name of a communication buffer.
            name = f"linear_{tp_comm_buffer_name}"
            self.lora = Adapters(name, input_size, output_size, lora=lora, group=group, weight=self.weight, **options)

        def forward(self, x: Tensor, *arguments: Any) -> Any:
            result, bias = super().forward(x, *arguments)
            return self.lora(x, result), bias

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            # Megatron's method would save each rank's shard of the adapters as if the shard were the whole tensor.
            return state | self.lora.sharded_state_dict(f"{prefix}lora.", sharded_offsets, metadata)

    return WithAdapters


def with_lora(provider: Any, lora: LoraSection) -> Any:
    """A provider of the layer classes of `provider`, with adapters in all linear layers."""

    class WithLora(type(provider)):  # type: ignore[misc]
        def fuse_layernorm_and_linear(self) -> bool:
            # Adapters read the result of the norm, so the norm stays separate.
            return False

        def column_parallel_linear(self) -> type:
            return with_adapters(super().column_parallel_linear(), lora)

        def row_parallel_linear(self) -> type:
            return with_adapters(super().row_parallel_linear(), lora)

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
            submodules = MLPSubmodules(
                linear_fc1=self.column_parallel_linear(),
                linear_fc2=self.row_parallel_linear(),
                activation_func=self.activation_func(),
            )
            return partial(SequentialMLP, submodules=submodules)

    return WithLora()


def fill_adapters(chunks: Sequence[Any], adapters: Family, recipe: Recipe, parallel: Parallel) -> None:
    """Fill this rank's shards of the adapters, from policy.adapter if it is set.

    Otherwise A is drawn by the run's seed, and B is zero.

    Raises ValueError for a folder whose adapters differ from policy.lora.
    """
    read: Callable[..., Tensor] = partial(_new_factor, recipe.seed)
    if recipe.policy.adapter is not None:
        read = adapter_reader(recipe.policy, adapters).read
    fill(chunks, adapters, read, parallel)


def _new_factor(seed: int, name: str, index: tuple[Index, ...], shape: tuple[int, ...]) -> Tensor:
    """A part of a new factor, drawn from PEFT's distribution.

    Every rank draws the whole factor from the same seed, so the values do not depend on the layout.
    """
    if name.endswith(".lora_B.weight"):
        return torch.zeros(shape)[index]
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    # This is kaiming_uniform_ with a = sqrt(5), as in peft/tuners/lora/layer.py.
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)[index]

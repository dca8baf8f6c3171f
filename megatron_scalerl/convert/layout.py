"""Where Megatron's distributed checkpoints keep a parameter of the weight map: key, leading axes, names besides.

Read from megatron-core 0.16.1 (transformer_block.py and moe/experts.py, `sharded_state_dict`) and held by a test
against what the stock save writes: equal layers are stacked along a leading axis, unequal ones are numbered;
experts are stacked along an axis of their own; norms before a linear layer carry Transformer Engine's names;
every linear layer has an object `_extra_state`, empty unless fp8 is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time this would import torch into every worker
    from megatron_scalerl.models.family import Family, Rule

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LINEAR = re.compile(r"\.(linear_qkv|linear_proj|linear_fc1|linear_fc2)\.weight$")
_TE_MODULES = re.compile(r"(\.q_layernorm|\.k_layernorm|\.pre_mlp_layernorm|final_layernorm)\.weight$")
"""Modules that have an extra state with Transformer Engine's layers only (read in its source, not run)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A parameter's place in a checkpoint: tensor[offset] of the tensor called `key`."""

    key: str
    offset: tuple[int, ...]
    """Layer, expert, or nothing: position on the leading axes."""
    sizes: tuple[int, ...]
    """Lengths of the leading axes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a parameter is written, and where it may be found."""

    written: Address
    readable: tuple[Address, ...]
    """Every address that a checkpoint of this family may have it at; they exclude each other."""


def place_of(rule: Rule, family: Family) -> Place:
    """Where the checkpoint keeps `rule`'s parameter."""
    name = _name(rule, family)
    here, other = (_address(rule, family, name, stacked=stacked) for stacked in _stackings(family))
    return Place(written=here, readable=tuple(dict.fromkeys((here, other))))


def extra_states(family: Family) -> Iterator[str]:
    """Keys of the empty objects that the stock load expects beside the tensors."""
    for rule in family.rules:
        if not rule.exported:
            continue
        address = place_of(rule, family).written
        if _LINEAR.search(address.key) or _TE_MODULES.search(address.key):
            yield _object_key(address.key.removesuffix("weight"), address)
        if address.key.endswith(".linear_qkv.weight"):
            yield _object_key(address.key.removesuffix("linear_qkv.weight") + "core_attention.", address)


def _object_key(module: str, address: Address) -> str:
    offset, sizes = address.offset or (0,), address.sizes or (1,)
    return f"{module}_extra_state/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, sizes))}"


def _stackings(family: Family) -> tuple[bool, bool]:
    """(what this family's own layers do, the other way)."""
    frequency = family.transformer.get("moe_layer_freq", 1)
    stacked = isinstance(frequency, int) and frequency <= 1
    return stacked, not stacked


def _name(rule: Rule, family: Family) -> str:
    """Name of the parameter in checkpoints, before layers and experts are folded."""
    for plain, fused in _NORMS.items():
        if rule.megatron.endswith(f".{plain}"):
            # Transformer Engine has no fused norm before experts and keeps it under its plain name.
            alone = plain.startswith("pre_mlp") and family.layers[rule.layer].moe
            return rule.megatron if alone else rule.megatron.removesuffix(plain) + fused
    return rule.megatron


def _address(rule: Rule, family: Family, name: str, *, stacked: bool) -> Address:
    offset: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    layer = _LAYER.match(name)
    if layer is not None and stacked:
        name = f"decoder.layers.{name[layer.end() :]}"
        offset, sizes = (int(layer[1]),), (len(family.layers),)
    expert = _EXPERT.search(name)
    if expert is not None:
        name = _EXPERT.sub(".experts.experts.", name)
        offset, sizes = (*offset, int(expert[1])), (*sizes, int(family.transformer["num_moe_experts"]))
    return Address(key=name, offset=offset, sizes=sizes)

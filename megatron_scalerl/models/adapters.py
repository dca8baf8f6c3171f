"""The weight map of adapters: the factors A and B of each linear layer, by Megatron's and by PEFT's names.

A linear layer of Megatron consists of one to three projections of Hugging Face's format, and each projection has
factors of its own, as in a PEFT folder. Factors are sharded like the weight that they adapt: B along the output of a
layer that tensor-parallel ranks split by outputs, A along the input of one that they split by inputs. The other
factor is whole on every rank. A rank's rows of a B are consecutive, also where queries, keys and values are
interleaved in the weight.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.family import Family, Rule
from megatron_scalerl.models.rules import Location

PROJECTIONS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's linear layer -> the projections of its output, in their order."""
CONFIG = "adapter_config.json"
"""The file by which a folder is known as PEFT's."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The configuration of a PEFT folder. Raises ValueError for a file that is missing or holds no JSON object."""
    file = Path(folder, CONFIG)
    try:
        config = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: this is no configuration of a PEFT folder: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: this is no configuration of a PEFT folder: it is not a JSON object")
    return config


def refuse_adapter(folder: str | Path) -> None:
    """Raises ValueError for a PEFT folder in the place of a policy: what it is, and what to do."""
    if not Path(folder, CONFIG).is_file():
        return
    config = read_config(folder)
    base = str(config.get("base_model_name_or_path") or "the folder of its base")[:200]
    raise ValueError(
        f"{folder}: this folder is an adapter (it has {CONFIG}), not a whole policy; merge it into {base} with PEFT, "
        f"or to train on from it set policy.path={base}, policy.adapter={folder} and "
        f"'policy.lora={{rank: {config.get('r')}, alpha: {config.get('lora_alpha')}}}'"
    )


def is_adapter(name: str) -> bool:
    """True for the name of an adapter's parameter, which belongs to no weight map of a family."""
    return ".lora." in name


def adapter_family(family: Family, *, rank: int, targets: Collection[str]) -> Family:
    """The family with the rules of its adapters in place of those of its weights; `targets` are projections."""
    factors = [factor for rule in family.rules for factor in _factors(rule, rank, targets)]
    return replace(family, rules=tuple(factors))


def projections_of(rule: Rule) -> tuple[str, tuple[str, ...]]:
    """(Megatron's name of the rule's layer, the projections of its weight, through which pieces go in turn).

    Parameters without adapters have no projections. Queries, keys and values are interleaved: each group has a piece.
    """
    layer, _, kind = rule.megatron.rpartition(".")
    if kind != "weight":
        return layer, ()
    return layer, PROJECTIONS.get(layer.rpartition(".")[2], ())


def _factors(rule: Rule, rank: int, targets: Collection[str]) -> Iterator[Rule]:
    linear, projections = projections_of(rule)
    if not projections:
        return
    pieces = rule.pieces(0, 1)
    shape = [part.stop - part.start for part in pieces[0].hf_index if isinstance(part, slice)]
    if pieces[0].transposed:
        shape.reverse()
    at = Location(layer=rule.layer, expert=rule.expert)
    for number, projection in enumerate(projections):
        if projection not in targets:
            continue
        hf = f"base_model.model.{_module(rule, number, projection)}"
        a = (f"{linear}.lora.{projection}_A", f"{hf}.lora_A.weight")
        b = (f"{linear}.lora.{projection}_B", f"{hf}.lora_B.weight")
        if pieces[0].axis == 1:
            yield rules.row(*a, rank, pieces[0].stop, at, what=linear)
            yield rules.replicated(*b, (shape[0], rank), at)
            continue
        rows = sum(piece.stop - piece.start for piece in pieces[number :: len(projections)])
        yield rules.replicated(*a, (rank, shape[1]), at)
        yield rules.column(*b, rows, rank, at, what=linear)


def _module(rule: Rule, number: int, projection: str) -> str:
    """Hugging Face's module of a rule's projection; experts in one tensor have the names of separate ones."""
    names = list(rule.hf_shapes)
    if names[0].endswith(".weight"):
        return names[number].removesuffix(".weight")
    return f"{names[0].rpartition('.')[0]}.{rule.expert}.{projection}"

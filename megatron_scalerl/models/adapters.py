"""The weight map of LoRA adapters: the factors A and B of each linear layer, by Megatron's and by PEFT's names.

A linear layer of Megatron consists of one to three projections of Hugging Face's format. Each projection has a pair A
and B, as in a PEFT folder. If tensor-parallel ranks split the layer by outputs, B is sharded along the outputs, and
every rank has the whole A. If the ranks split the layer by inputs, A is sharded along the inputs, and every rank has
the whole B. The rows that a rank has of a B are consecutive in the whole B, even if the layer's weight interleaves
queries, keys and values.
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
"""Name of Megatron's linear layer -> Hugging Face's projections whose outputs the layer concatenates, in order."""
CONFIG = "adapter_config.json"
"""A folder with a file of this name is a PEFT folder."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """The configuration of a PEFT folder. Raises ValueError for a file that is missing or holds no JSON object."""
    file = Path(folder, CONFIG)
    try:
        config = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the file is not a valid PEFT configuration: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: the file is not a valid PEFT configuration: a JSON object is expected")
    return config


def refuse_adapter(folder: str | Path) -> None:
    """Raises ValueError if the folder of a policy is a PEFT folder. The message says how to use the adapter."""
    if not Path(folder, CONFIG).is_file():
        return
    config = read_config(folder)
    base = str(config.get("base_model_name_or_path") or "the base model's folder")[:200]
    raise ValueError(
        f"{folder}: the folder holds an adapter ({CONFIG}), not a whole policy; merge the adapter into {base} with "
        f"PEFT, or, to continue its training, set policy.path={base}, policy.adapter={folder} and "
        f"'policy.lora={{rank: {config.get('r')}, alpha: {config.get('lora_alpha')}}}'"
    )


def is_adapter(name: str) -> bool:
    """Whether a Megatron parameter of this name belongs to an adapter. No parameter of the policy itself has
    ".lora."."""
    return ".lora." in name


def adapter_family(family: Family, *, rank: int, targets: Collection[str]) -> Family:
    """The family with the weight map of the adapters in place of the weight map of the weights.

    rank: rows of each A. targets: names of the adapted projections, such as q_proj.
    """
    factors = [factor for rule in family.rules for factor in _factors(rule, rank, targets)]
    return replace(family, rules=tuple(factors))


def projections_of(rule: Rule) -> tuple[str, tuple[str, ...]]:
    """Return (Megatron's name of the rule's layer, Hugging Face's projections that make up the layer's weight).

    The rule's pieces alternate between the projections: in a weight with interleaved queries, keys and values, every
    group has one piece of each projection. For a parameter that no adapter can change, projections is ().
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
    """Hugging Face's module name of a rule's projection. For fused experts, the names that separate experts would
    have."""
    names = list(rule.hf_shapes)
    if names[0].endswith(".weight"):
        return names[number].removesuffix(".weight")
    return f"{names[0].rpartition('.')[0]}.{rule.expert}.{projection}"

"""Exact parameter counts, total and per rank, from the family's weight map.

The map's rules assign a slice of each Hugging Face tensor to each rank of a parallel group. The same rules load
checkpoints. `meta_build` verifies the counts against Megatron's own modules.
"""

import math
from pathlib import Path

from megatron_scalerl.models import family as family_of
from megatron_scalerl.models import read_hf_config
from megatron_scalerl.models.adapters import adapter_family
from megatron_scalerl.models.family import Family, Rule
from megatron_scalerl.plan.sharding import Layout
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record


@record
class Parameters:
    """Parameter counts of a policy."""

    total: int
    """Parameters of the trained policy, without a vision tower."""
    active: int
    """Parameters that one token uses, embedding included."""
    experts: int
    """Parameters of all routed experts."""
    embedding: int
    head: int
    """Parameters of the logit projection. `total` counts tied embeddings once."""
    passthrough: int
    """Parameters of layers of multi-token prediction, which a run does not load."""


@record
class RankParameters:
    """Parameters on each rank of a pipeline stage, vocabulary padding included."""

    dense: int
    expert: int
    largest: int
    """Number of elements of the largest weight."""

    @property
    def total(self) -> int:
        """Number of all parameters of the rank."""
        return self.dense + self.expert


def load_family(config_path: str | Path) -> Family:
    """The family of the model in a folder with a config.json. Raises ValueError for an unsupported model."""
    return family_of(read_hf_config(config_path))


def count(family: Family) -> Parameters:
    """Parameter counts of the whole policy."""
    rules = [r for r in family.rules if r.exported and not r.frozen]
    total = sum(elements(r) for r in rules)
    experts = sum(elements(r) for r in rules if r.expert is not None)
    first = sum(elements(r) for r in rules if r.place == "first")
    number = family.transformer.get("num_moe_experts") or 1
    used = family.transformer.get("moe_router_topk", 1)
    return Parameters(
        total=total,
        active=total - experts + experts * used // number,
        experts=experts,
        embedding=first,
        head=sum(elements(r) for r in family.rules if r.megatron == "output_layer.weight"),
        passthrough=family.untrained,
    )


def trained_family(recipe: Recipe, family: Family) -> Family:
    """The family with the weight map of the trained parameters: with policy.lora, of the adapters alone."""
    lora = recipe.policy.lora
    if lora is None:
        return family
    return adapter_family(family, rank=lora.rank, targets=lora.targets)


def elements(rule: Rule, size: int = 1) -> int:
    """Number of a parameter's elements on rank 0 of a parallel group of `size` ranks; no rank has more. rule: the
    parameter's rule in the weight map."""
    slices = ([index for index in piece.hf_index if isinstance(index, slice)] for piece in rule.pieces(0, size))
    return sum(math.prod(index.stop - index.start for index in piece) for piece in slices)


def of_stage(family: Family, layout: Layout, stage: int) -> RankParameters:
    """Parameter counts of each rank of a pipeline stage. Raises ValueError if a parallel size does not divide a
    weight."""
    last = layout.pp - 1
    experts = family.transformer.get("num_moe_experts") or 1
    dense = [0]
    expert = [0]
    for rule in family.rules:
        has_rule = rule.layer in layout.stages[stage]
        if rule.place in ("first", "last"):
            has_rule = stage == {"first": 0, "last": last}[rule.place]
        # With a single stage, embedding and head share tied weights. With several, the last stage holds a copy.
        if not has_rule or rule.frozen or not (rule.exported or layout.pp > 1):
            continue
        if rule.expert is None:
            dense.append(elements(rule, layout.tp))
        elif rule.expert < experts // layout.ep:
            expert.append(elements(rule, layout.etp))
    return RankParameters(dense=sum(dense), expert=sum(expert), largest=max(*dense, *expert))

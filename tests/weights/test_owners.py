"""Who sends what: every layout sends every element once, from the rank that holds it, in even shares."""

from itertools import product

import pytest
import torch
from family_configs import LLAMA, LLAMA4, QWEN3_MOE, family_of, shard_of
from sampling import sampled
from transformers import Llama4TextConfig, LlamaConfig, Qwen3MoeConfig
from worker_needs import needs_of_worker

from megatron_scalerl.models import family
from megatron_scalerl.weights.owners import Place, manifest, send_plan
from megatron_scalerl.weights.plan import all_of, check, volume, within

WIDE = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64, "num_hidden_layers": 4}
FAMILIES = {
    "llama": lambda: family_of("llama"),
    "llama tied": lambda: family_of("llama tied"),
    "qwen3_moe": lambda: family(Qwen3MoeConfig(**QWEN3_MOE, mlp_only_layers=[0])),
    "qwen3_moe fused": lambda: family_of("qwen3_moe fused"),
    "llama4": lambda: family(Llama4TextConfig(**{**LLAMA4, "num_local_experts": 4})),
}


def layout(*, tp=1, pp=1, dp=1, ep=1, etp=1):
    """The place of every rank, in Megatron's order: tensor, data (with context), pipeline parallel."""
    found = []
    for rank in range(tp * pp * dp):
        here = rank % (tp * dp)
        experts = here // etp
        found.append(
            Place(
                tp=here % tp,
                pp=rank // (tp * dp),
                ep=experts % ep,
                etp=here % etp,
                copy=here // tp,
                expert_copy=experts // ep,
            )
        )
    return found


def stages(found, pp):
    layers = len(found.layers)
    return {layer: layer * pp // layers for layer in range(layers)}


def check_sent(found, places, plan):
    """What each sender's own shards hold makes up what every shard of the engines needs, and nothing else."""
    shapes = {name: shape for rule in found.rules for name, shape in rule.hf_shapes.items()}
    source = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}
    rules = {rule.megatron: rule for rule in found.rules}
    tp, etp, ep = (1 + max(getattr(place, key) for place in places) for key in ("tp", "etp", "ep"))
    back = [{name: torch.full(shape, float("nan")) for name, shape in shapes.items()} for _ in plan.plan.needs]
    for part, holding in zip(plan.plan.parts, plan.holdings):
        place, rule = places[plan.ranks[part.sender]], rules[holding.megatron]
        rank, size = (place.etp, etp) if rule.expert is not None else (place.tp, tp)
        if rule.expert is not None:
            experts = found.transformer["num_moe_experts"] // ep
            assert rule.expert // experts == place.ep, "sent by a rank that has other experts"
        expected = {"first": 0, "last": max(p.pp for p in places)}.get(rule.place)
        assert place.pp == (
            stages(found, 1 + max(p.pp for p in places))[rule.layer] if expected is None else expected
        )
        shard = shard_of(rule, rank, size, source)
        name = plan.plan.parameters[part.tensor].name
        values = holding.piece.of_shard(shard).reshape([b - a for a, b in holding.ranges])
        back[part.shard][name][tuple(slice(a, b) for a, b in part.ranges)] = values[
            within(holding.ranges, part.ranges)
        ]
    for of_shard, needs in zip(back, plan.plan.needs):
        for meta, rectangles in zip(plan.plan.parameters, needs):
            for ranges in rectangles:
                where = tuple(slice(a, b) for a, b in ranges)
                assert torch.equal(of_shard[meta.name][where], source[meta.name][where]), meta.name
                of_shard[meta.name][where] = float("nan")
            assert of_shard[meta.name].isnan().all(), f"{meta.name}: more than was needed"


LAYOUTS = [(tp, pp, dp, ep) for tp, pp, dp, ep in product((1, 2), (1, 2), (1, 2, 4), (1, 2)) if tp * dp % ep == 0]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tp, pp, dp, ep", sampled("owners", LAYOUTS, 7))
def test_every_layout_sends_the_checkpoint(kind, tp, pp, dp, ep):
    found = FAMILIES[kind]()
    for etp in (1, tp):
        if (tp * dp) % (ep * etp):
            continue
        places = layout(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp)
        for most, workers in product((1, 64), (1, 2)):
            needs = [needs_of_worker(manifest(found, "float32"), worker, workers) for worker in range(workers)]
            plan = send_plan(found, places, stages(found, pp), needs, dtype="float32", most_senders=most)
            check_sent(found, places, plan)
            names = {name for rule in found.rules if rule.exported for name in rule.hf_shapes}
            assert sorted(meta.name for meta in plan.plan.parameters) == sorted(names)


def _plan(found, *, tp, pp, dp, most=64, **more):
    places = layout(tp=tp, pp=pp, dp=dp, **more)
    needs = [all_of(manifest(found, "bfloat16"))]
    return send_plan(found, places, stages(found, pp), needs, dtype="bfloat16", most_senders=most)


def shares(plan):
    """Bytes of each sender, as a share of all."""
    sent = [0] * plan.plan.senders
    for part in plan.plan.parts:
        sent[part.sender] += volume(part.ranges)
    return [each / sum(sent) for each in sent]


def test_shares_are_even_over_tensor_and_data_parallel_ranks():
    found = family(LlamaConfig(**WIDE))
    for tp, dp in ((1, 8), (8, 1), (4, 2), (2, 4)):
        plan = _plan(found, tp=tp, pp=1, dp=dp)
        assert plan.ranks == tuple(range(8)) and max(shares(plan)) < 1.35 / 8, (tp, dp, shares(plan))


def test_no_more_ranks_send_than_asked_for_unless_one_copy_needs_them():
    found = family(LlamaConfig(**WIDE))
    assert [_plan(found, tp=1, pp=1, dp=8, most=n).plan.senders for n in (1, 3, 8)] == [1, 3, 8]
    assert [_plan(found, tp=2, pp=2, dp=4, most=n).plan.senders for n in (1, 7, 8, 16)] == [4, 4, 8, 16]


def test_a_large_mixture_of_experts():
    """128 ranks: tensor parallel 4, pipeline 4, expert parallel 8; made in a moment, and even."""
    config = {**QWEN3_MOE, **WIDE, "num_experts": 32, "mlp_only_layers": [], "num_hidden_layers": 8}
    found = family(Qwen3MoeConfig(**config))
    plan = _plan(found, tp=4, pp=4, dp=8, ep=8, most=128)
    check(plan.plan)
    assert plan.plan.senders == 128 and max(shares(plan)) < 3 / 128


def test_plans_of_all_ranks_are_one():
    first, second = (_plan(FAMILIES["llama4"](), tp=2, pp=2, dp=2, ep=2) for _ in range(2))
    assert first.plan.digests == second.plan.digests
    assert first.plan.digests != _plan(FAMILIES["llama4"](), tp=2, pp=2, dp=2, ep=1).plan.digests

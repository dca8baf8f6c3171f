"""The simulated weight update: places and needs that make up the policy, bytes by counting, seconds by hand."""

import pytest
from megatron.core.parallel_state import RankGenerator
from planned_recipes import family_of, recipe_of

from megatron_scalerl.plan.sharding import layout_of
from megatron_scalerl.plan.update import EngineShape, places_of, update_work, worker_needs
from megatron_scalerl.weights.owners import manifest
from megatron_scalerl.weights.plan import not_covered, volume

DENSE, SCOUT = "Llama-3.1-8B", "Llama-4-Scout-17B-16E"
RECIPES = {DENSE: "scalerl_llama3_8b", SCOUT: "scalerl_llama4_scout_17bx16"}
ITEM = 2
"""Bytes of an element in bf16."""


def work_of(name, *overrides):
    recipe, family = recipe_of(RECIPES[name], *overrides), family_of(name)
    return update_work(recipe, family, layout_of(recipe, family, recipe.trainer.world_size))


@pytest.mark.parametrize(
    "world, sizes",
    [
        (16, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        (64, {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "pipeline_model_parallel_size": 2}),
        (
            64,
            {
                "tensor_model_parallel_size": 4,
                "expert_model_parallel_size": 8,
                "expert_tensor_parallel_size": 1,
                "pipeline_model_parallel_size": 2,
            },
        ),
    ],
)
def test_ranks_stand_where_megatron_puts_them(world, sizes):
    name = SCOUT if "expert_model_parallel_size" in sizes else DENSE
    overrides = [f"megatron.parallel={sizes}".replace("'", ""), "megatron.model={sequence_parallel: true}"]
    overrides.append(f"trainer.world_size={world}")
    recipe = recipe_of(RECIPES[name], *overrides)
    layout = layout_of(recipe, family_of(name), world)
    places = places_of(layout)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    experts = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.expert_shards, pp=layout.pp, cp=1, order=order)

    def found(groups):
        """[rank] its place in its group."""
        where = {rank: place for group in groups for place, rank in enumerate(group)}
        return [where[rank] for rank in range(world)]

    assert [place.tp for place in places] == found(dense.get_ranks("tp"))
    assert [place.pp for place in places] == found(dense.get_ranks("pp"))
    assert [place.copy for place in places] == found(dense.get_ranks("dp-cp"))
    assert [place.etp for place in places] == found(experts.get_ranks("tp"))
    assert [place.ep for place in places] == found(experts.get_ranks("ep"))
    assert [place.expert_copy for place in places] == found(experts.get_ranks("dp"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [DENSE, SCOUT])
@pytest.mark.parametrize(
    "shape",
    [
        EngineShape(),
        EngineShape(tensor=4),
        EngineShape(tensor=4, whole_experts=True),
        EngineShape(tensor=2, pipeline=2),
    ],
)
def test_the_workers_of_an_engine_need_the_whole_policy(name, shape):
    family = family_of(name)
    parameters, needs = manifest(family, "bfloat16"), worker_needs(family, shape)
    assert len(needs) == shape.tensor * shape.pipeline and not not_covered(parameters, needs)
    needed = sum(volume(ranges) for of_shard in needs for of_tensor in of_shard for ranges in of_tensor)
    whole = sum(volume(tuple((0, size) for size in meta.shape)) for meta in parameters)
    assert whole <= needed <= 1.001 * whole  # norms and routers are in every tensor-parallel worker


def test_a_dense_policy_is_sent_once_by_all_senders_and_received_whole_by_every_worker():
    work = work_of(DENSE)
    assert (work.senders, work.groups, work.bytes) == (2, 2, 8_030_261_248 * ITEM)
    assert work.most_received == pytest.approx(work.bytes, rel=1e-4)  # alignment
    assert sum(work.sent.values()) == work.most_received
    assert work.bytes / 2 <= work.most_sent <= 1.1 * work.bytes / 2  # two tensor-parallel ranks: one copy
    assert work.bound_seconds(50e9) == work.most_received / 50e9


@pytest.mark.slow
def test_no_rank_sends_and_no_worker_gets_more_than_its_share_of_a_mixture_of_experts():
    work = work_of(SCOUT)
    assert work.bytes == 107_769_861_120 * ITEM and work.senders == 32
    assert work.bytes / 8 <= work.most_received <= 1.01 * work.bytes / 8
    assert work.bytes / 32 <= work.most_sent <= 1.1 * work.bytes / 32

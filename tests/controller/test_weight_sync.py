"""A weight update of which one engine drops out: the others are updated, and none of them is evicted."""

import asyncio
import re

import pytest
from fakes.engine import StandInEngine
from fakes.trainer import StandInTrainer
from recipe_files import small_recipe

from megatron_scalerl.controller.weight_sync import WeightsRefused, WeightsUnchanged, WeightSync
from megatron_scalerl.engine.answers import REFUSED
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.trainer.client import TrainerError, WeightGroupFailed
from megatron_scalerl.types import StepReport
from megatron_scalerl.weights.plan import all_of, manifest_of, needs_to_json

MANIFEST = manifest_of([("w", "float32", (4,))])


def engine(name="engine-0", **options):
    """One without weights yet that needs all of them."""
    return StandInEngine(name, -1, needs=[all_of(MANIFEST)], **options)


def trainer(*fails):
    return StandInTrainer(fails=fails, manifest=MANIFEST)


def publish(sender, members, recipe, version):
    return asyncio.run(WeightSync(sender, members, recipe).publish(version))


def frozen():
    made = trainer()
    made.frozen = True
    return made


@pytest.fixture
def recipe():
    return small_recipe(weights={"transport": "gloo"})


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_engines_that_had_started_an_update_take_part_in_the_next_one(recipe, path):
    engines = [engine(), engine("engine-1", fails=path), engine("engine-2")]
    sender, members = trainer(), Membership.of(engines)
    update = publish(sender, members, recipe, 3)
    assert members.serving == [engines[0], engines[2]] and sender.world_size == 3
    # of the attempt that succeeded
    assert list(update.phases) == ["needs", "connect", "pause", "start", "update", "finish", "verify", "resume"]
    assert sum(update.phases.values()) <= update.seconds_total
    metrics = update.metrics()
    assert metrics["weight_update_seconds"] == update.phases["update"] and metrics["weight_gb_per_s"] >= 0
    assert [(e.label, e.paused, e.updating) for e in members.serving] == [("3", False, False)] * 2


def test_a_trainer_that_fails_while_it_sends_leaves_engines_that_the_next_trainer_can_update(recipe):
    engines = [engine(), engine("engine-1")]
    members = Membership.of(engines)
    with pytest.raises(TrainerError):
        publish(trainer(TrainerError("rank 0 exited")), members, recipe, 3)
    publish(trainer(), members, recipe, 2)
    assert members.serving == engines and [e.label for e in engines] == ["2", "2"]


def test_a_broadcast_that_fails_at_the_trainer_alone_evicts_no_engine(recipe):
    engines = [engine(), engine("engine-1")]
    members = Membership.of(engines)
    failing = trainer(*[WeightGroupFailed("the group was closed")] * 2)
    publish(failing, members, recipe, 3)
    assert members.serving == engines


def after_a_step(recipe, trainer, **report):
    """Publish versions 0 and 1, with an optimizer step in between."""
    made = engine()
    sync = WeightSync(trainer, Membership.of([made]), recipe)

    async def scenario():
        if trainer.frozen:
            made.live = "v0"
        await sync.publish(0)
        sync.trained(StepReport(step=1, policy_version=1, loss=0.1, tokens=4, seconds=1.0, metrics={}, **report))
        await sync.publish(1)
        await sync.publish(1)  # sent again without a step: nothing has to differ

    asyncio.run(scenario())
    return made.label


def test_a_step_with_a_gradient_that_changes_no_value_is_an_error(recipe):
    message = (
        r"^weights of version 1 .* version 0 \(digest v0\) after a step with gradient norm 0\.3 and learning rate "
        r"5e-07: "
    )
    with pytest.raises(WeightsUnchanged, match=message):
        after_a_step(recipe, frozen(), grad_norm=0.3, learning_rate=5e-7)


@pytest.mark.parametrize("grad_norm, learning_rate", [(0.0, 5e-7), (0.3, 0.0), (0.3, 4e-7)])
def test_a_step_that_moves_nothing_need_not_change_a_value(recipe, grad_norm, learning_rate):
    after_a_step(recipe, frozen(), grad_norm=grad_norm, learning_rate=learning_rate)


def break_broadcasts(engine, trainer):
    """Every broadcast fails at all members once the engine has joined, as with a broken network interface."""
    post, connect, send = engine.post, trainer.connect_weights, trainer.send_weights
    joined = []

    async def join(path, body, query=None):
        joined.extend([path] * (path == "/init_weight_transfer_engine"))
        return await post(path, body, query)

    async def connected(connection):
        await connect(connection)
        joined.clear()

    async def broken(version):
        await asyncio.sleep(0)
        if joined:
            raise WeightGroupFailed("a broadcast timed out")
        return await send(version)

    engine.post, trainer.connect_weights, trainer.send_weights = join, connected, broken


@pytest.mark.parametrize("alone", [True, False])
async def test_an_engine_that_breaks_every_broadcast_it_joins_is_evicted_and_the_others_go_on(recipe, alone):
    good, broken, sender = engine(), engine("engine-1"), trainer()
    break_broadcasts(broken, sender)
    members = Membership(2)
    members.join(0, good)
    sync = WeightSync(sender, members, recipe)
    await sync.publish(1)
    members.join(1, broken)
    if alone:
        assert await sync.catch_up(1) is None
    else:
        await sync.publish(2)
    assert members.serving == [good] and members.members[1].state == "draining"
    assert "no update in 3 tries" in members.members[1].reason
    await sync.publish(3)
    assert good.label == "3"


NOT_WHOLE = needs_to_json(((((0, 2),),),))
REFUSALS = [
    ([REFUSED + "weights: the checkpoint does not fill norm exactly once: 4 values are missing"], "4 values"),
    ([NOT_WHOLE], r"weights: w: the 1 rectangles .*\(4,\)"),
]


@pytest.mark.parametrize("answers, reason", REFUSALS)
def test_tensors_that_are_not_the_engines_end_the_run_at_its_first_update(recipe, answers, reason):
    engines = [engine(), engine("engine-1")]
    for each in engines:
        each.needs = answers
    with pytest.raises(WeightsRefused, match=f"^engine-0: needs: .*{reason}"):
        publish(trainer(), Membership.of(engines), recipe, 0)


def test_one_engine_of_another_model_does_not_end_a_run_that_others_can_go_on_with(recipe):
    """As when the trainer was started again, and nobody has taken an update from it yet."""
    engines = [engine(), engine("extra-0")]
    engines[1].needs = REFUSALS[0][0]
    members = Membership.of(engines)
    publish(trainer(), members, recipe, 0)
    assert members.serving == engines[:1] and "4 values" in members.members[1].reason


@pytest.mark.parametrize("world_size, serves", [(2, True), (3, False)])
def test_workers_of_all_data_parallel_ranks_take_part(recipe, world_size, serves):
    """vLLM answers for those of the first rank."""
    engines = [engine(), engine("engine-1")]
    engines[1].world_size = world_size
    engines[1].needs *= 1 if serves else 2
    members, sender = Membership.of(engines), trainer()
    publish(sender, members, recipe, 0)
    assert members.serving == engines[: 1 + serves] and sender.world_size == (1 + 1 + 2 * serves)


async def test_a_later_engine_of_another_model_is_evicted(recipe):
    good, other = engine(), engine("engine-1")
    other.needs = [REFUSALS[0][0][0]]
    members = Membership(2)
    members.join(0, good)
    sync = WeightSync(trainer(), members, recipe)
    await sync.publish(1)
    members.join(1, other)
    assert await sync.catch_up(1) is None
    assert members.serving == [good] and "4 values" in members.members[1].reason


def test_an_engine_that_holds_other_values_than_were_sent_never_serves_them(recipe):
    good, corrupt = engine(), engine("engine-1")
    corrupt.live = "feed"
    members = Membership.of([good, corrupt])
    publish(trainer(), members, recipe, 3)
    assert members.serving == [good] and corrupt.paused
    assert re.fullmatch("engine-1: verify: worker 0: .* feed, .* v3", members.members[1].reason)

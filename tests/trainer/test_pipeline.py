"""Stages know the shapes of micro-batches beforehand, in the order of the schedule."""

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
from random_policy import batches_of, random_samples

from megatron_scalerl.trainer.layers.context import share_length, share_of
from megatron_scalerl.trainer.pipeline import known_shapes


def config(**changes):
    settings = dict(
        variable_seq_lengths=True,
        virtual_pipeline_model_parallel_size=None,
        hidden_size=32,
        sequence_parallel=False,
        tensor_model_parallel_size=1,
    )
    return SimpleNamespace(**(settings | changes))


def keywords(new_trainer, settings, **place):
    [batch] = batches_of(random_samples(1), micro_batch_tokens=64)
    return known_shapes(batch.micro_batches, settings, replace(new_trainer().parallel, **place))


@pytest.mark.parametrize("tp", [1, 4])
def test_shapes_come_in_the_order_of_the_micro_batches(tp, new_trainer):
    """Sequence-parallel stages exchange a part."""
    [batch] = batches_of(random_samples(1), micro_batch_tokens=64)
    lengths = [len(m.tokens) for m in batch.micro_batches]
    assert len(set(lengths)) > 1
    settings = config(sequence_parallel=tp > 1, tensor_model_parallel_size=tp)
    found = keywords(new_trainer, settings, pp_size=2, tp_size=tp)
    assert set(found) == {"p2p_communicator", "pg_collection"}
    ask = found["p2p_communicator"]._communicate_shapes
    first, second, *_ = [(-(-length // tp), 1, 32) for length in lengths]
    assert ask(None, None, True, False) == (first, (0, 0, 0))
    assert ask(None, None, True, True) == (second, first)
    assert ask(None, None, False, True) == ((0, 0, 0), second)


@pytest.mark.parametrize(
    "changes, stages",
    [({}, 1), ({"variable_seq_lengths": False}, 2), ({"virtual_pipeline_model_parallel_size": 2}, 2)],
)
def test_elsewhere_megatron_goes_on_alone(changes, stages, new_trainer):
    assert keywords(new_trainer, config(**changes), pp_size=stages) == {}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("divisor", [1, 2])
def test_lengths_are_those_of_the_shares(size, divisor):
    starts = [0, *accumulate([7, 1, 30, 0, 12])]
    share = share_of(starts, rank=0, size=size, group=None, divisor=divisor)
    places = starts[-1] if share.places is None else len(share.places)
    assert share_length(starts, size=size, divisor=divisor) == places

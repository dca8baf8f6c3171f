"""The garbage collector while an event loop must not stand still."""

import gc
import weakref

from megatron_scalerl.processes.garbage import FULL_COLLECTIONS_EVERY, rare_full_collections


class Cycle:
    def __init__(self):
        self.itself = self


def test_the_collector_is_as_before_afterwards_also_where_the_block_raises():
    before = gc.get_threshold()
    try:
        with rare_full_collections():
            assert gc.get_freeze_count() and gc.get_threshold() == (*before[:2], FULL_COLLECTIONS_EVERY)
            assert before[2] < FULL_COLLECTIONS_EVERY
            raise KeyError
    except KeyError:
        pass
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_young_cycles_are_freed_inside_the_block():
    with rare_full_collections():
        cycle = weakref.ref(Cycle())
        gc.collect(0)
        assert cycle() is None

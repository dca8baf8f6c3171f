"""The garbage collector while an event loop must not stand still."""

import gc
import platform
import sys
import weakref

import pytest
from programs import printed

from megatron_scalerl.processes.garbage import FULL_COLLECTIONS_EVERY, rare_full_collections, release_memory


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


FRAGMENTS = """
import os, threading
from megatron_scalerl.processes.garbage import release_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def allocate():
    made.extend(bytearray(64_000) for _ in range(1600))  # 98 MiB, below malloc's threshold for mmap

made = []
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
kept, made = made[::40], None
before = resident()
release_memory()
print(before - resident(), len(kept))
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="malloc_trim is glibc's")
def test_freed_fragments_of_a_threads_heap_return_to_the_system():
    assert int(printed(sys.executable, "-c", FRAGMENTS).split()[0]) > 70


HEAPS = """
import os, sys, threading
import numpy
from megatron_scalerl.processes.garbage import map_large_blocks, release_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def work():
    together.wait()  # each in a heap of its own
    kept.append(numpy.ones(1000))
    blocks = [numpy.ones(1 << 20) for _ in range(5)]  # 8 MiB each, at the end of the heap

if sys.argv[1] == "map":
    map_large_blocks()
for _ in range(3):
    numpy.ones(30 << 17)  # 30 MiB: freed, it raises glibc's thresholds
kept = []
together = threading.Barrier(4)
before = resident()
for _ in range(4):
    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
release_memory()
print(resident() - before)
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="mallopt's thresholds are glibc's")
def test_threads_keep_no_large_blocks():
    def kept(how):
        return int(printed(sys.executable, "-c", HEAPS, how))

    assert kept("map") < 10 < kept("as it is")


def test_cycles_are_collected():
    with rare_full_collections():
        cycle = weakref.ref(Cycle())
        release_memory()
        assert cycle() is None

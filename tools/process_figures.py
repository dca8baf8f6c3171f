"""Resources that processes use, and the lag of an event loop: for benchmarks."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import psutil


@dataclass
class Lag:
    """Delays of a timer (s)."""

    tick_s: float = 0.005
    samples: list[float] = field(default_factory=list)

    async def watch(self):
        """Tick until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self.tick_s
        while True:
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            while due <= now:  # a tick that the loop stood still for is late, too
                self.samples.append(now - due)
                due += self.tick_s

    def within(self, share):
        """Milliseconds that this share of all ticks did not exceed."""
        ordered = sorted(self.samples)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def processor_s(pids):
    """Processor time of processes that run (s)."""
    seconds = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            seconds += times.user + times.system
    return seconds

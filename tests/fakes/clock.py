"""Time that a test sets, and an event loop in virtual time."""

import asyncio
import selectors
from concurrent.futures import Future, ThreadPoolExecutor


class StandInClock:
    """Returns the time that it is set to."""

    now = 0.0

    def __call__(self):
        return self.now


class StandInExecutor(ThreadPoolExecutor):
    """Runs work at once, in the thread of the event loop: a jumping clock would not wait for another thread."""

    def submit(self, work, /, *arguments, **options):
        done = Future()
        try:
            done.set_result(work(*arguments, **options))
        except BaseException as failure:
            done.set_exception(failure)
        return done


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it.

    What the journal does in threads of the default executor takes no virtual time.
    """

    def __init__(self):
        self.now = 0.0
        super().__init__(_JumpingSelector(self))
        self.set_default_executor(StandInExecutor())

    def time(self):
        """Virtual seconds since the loop was created."""
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        assert timeout is not None, "every task waits and no timer is set: a deadlock"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


async def virtual_seconds(seconds):
    """Ends when these seconds of a loop in virtual time have passed."""
    await asyncio.sleep(seconds)

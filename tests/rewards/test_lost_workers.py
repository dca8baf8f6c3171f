"""Verifier processes that die: which check counts as the cause, which are repeated, and when the pool gives up."""

import asyncio
import errno
import os
import random
import signal

import pytest
from sampling import sampled
from verifier_pools import RIGHT, WRONG, pool_of, prompt, run_pool, wrong
from waiting import until
from worker_pools import shorten

from megatron_scalerl.processes import worker_pool
from megatron_scalerl.types import CompletionLost


class StandInSpawn:
    """Instead of starting a process, fails with the errors given, in this order; None starts it."""

    def __init__(self, monkeypatch, *errors, for_ever=None):
        self.started, self._errors, self._for_ever = 0, list(errors), for_ever
        self._spawn = asyncio.create_subprocess_exec
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self)

    async def __call__(self, *args, **options):
        error = self._errors.pop(0) if self._errors else self._for_ever
        if error is not None:
            raise OSError(error, os.strerror(error))
        self.started += 1
        return await self._spawn(*args, **options)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(worker_pool, "START_PAUSE_S", 0.01)
    monkeypatch.setattr(worker_pool, "ROUND_PAUSE_S", 0.01)


@pytest.mark.parametrize("fault", ["exit", "segfault", "kill", "quit"])
def test_an_answer_that_crashes_each_process_is_wrong_and_no_other_is(fault):
    scores, restarts = run_pool("faulty", ["7", fault, "8", "9"])
    assert scores == [RIGHT, wrong("crash"), WRONG, WRONG]
    assert restarts in (3, 4), "the last process may not have been replaced yet"


@pytest.mark.parametrize("kills", [1, 2, 4])
async def test_a_process_killed_from_outside_uses_one_of_four_tries(kills, tmp_path):
    extra = {"says": str(tmp_path / "says"), "waits": str(tmp_path / "waits")}
    for path in extra.values():
        os.mkfifo(path)

    def kill():
        with open(os.open(extra["says"], os.O_RDWR)) as says:  # without an end between two writers
            for _ in range(kills):
                os.kill(int(says.readline()), signal.SIGKILL)
            if kills < 4:
                says.readline()
                open(extra["waits"], "w").close()

    async with pool_of("held") as pool:
        calls = [pool.score(text, prompt(extra)) for text in ("7", "held", "8", "9")]
        *scores, _ = await asyncio.gather(*calls, asyncio.to_thread(kill))
        assert scores == [RIGHT, RIGHT if kills < 4 else wrong("crash"), WRONG, WRONG]
        assert kills - 1 <= pool.restarts <= kills


@pytest.mark.parametrize("seed", sampled("deaths", range(3), 1))
async def test_under_any_schedule_of_deaths_each_check_counts_its_own(seed, tmp_path):
    """Every run of a check creates a folder: a check that kills no process runs once, or is asked afresh."""
    draw = random.Random(seed)
    answers = [(f"{draw.choice('78')} of {n}", draw.choice([0, 0, 0, 1, 2, 4])) for n in range(24)]
    answers.insert(0, ("7 first", 0))
    async with pool_of("mortal", workers=2) as pool:
        extra = {"folder": str(tmp_path)}
        calls = [pool.score(text, prompt({**extra, "deaths": deaths})) for text, deaths in answers]
        scores = await asyncio.gather(*calls)
        restarts = pool.restarts
    alone = [RIGHT if text[0] == "7" else WRONG for text, _ in answers]
    assert scores == [
        wrong("crash") if deaths == 4 else score for score, (_, deaths) in zip(alone, answers, strict=True)
    ]
    runs = {f"{text} {run}" for text, deaths in answers for run in range(1, min(deaths + 1, 4) + 1)}
    afresh = set(os.listdir(tmp_path)) - runs
    assert runs <= set(os.listdir(tmp_path))
    assert len(afresh) == sum(deaths >= 2 for _, deaths in answers)
    # the last process that each worker lost may not have been replaced yet
    assert 0 <= sum(deaths for _, deaths in answers) - restarts <= 2


async def test_a_process_that_hangs_before_a_check_is_replaced_and_no_answer_is_wrong(monkeypatch):
    shorten(monkeypatch, [2])
    async with pool_of("same") as pool:
        os.kill(pool._workers.pids[0], signal.SIGSTOP)
        assert await pool.score("7", prompt()) == RIGHT
        assert pool.restarts == 1


async def test_processes_that_hang_before_each_check_end_the_run(monkeypatch):
    shorten(monkeypatch, [2])
    monkeypatch.setattr(worker_pool, "MAX_EARLY_LOSSES", 1)
    monkeypatch.setattr("megatron_scalerl.rewards.outages.MAX_UNAVAILABLE", 1)
    async with pool_of("same") as pool:
        os.kill(pool._workers.pids[0], signal.SIGSTOP)
        with pytest.raises(CompletionLost, match="no verifier process took"):
            await pool.score("7", prompt())
        with pytest.raises(RuntimeError, match="1 checks in a row could not be made"):
            await pool.score("8", prompt())


async def test_a_surviving_child_in_another_session_delays_nothing(tmp_path, monkeypatch):
    shorten(monkeypatch, [2, 7], ready=lambda: os.listdir(tmp_path))
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", ())
    async with pool_of("faulty") as pool:
        answers = [f"escape {tmp_path}", "7", *(["8" * 100_000] * 3)]  # more than a pipe holds
        calls = [pool.score(answer, prompt()) for answer in answers]
        try:
            scores = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)
        finally:
            for child in os.listdir(tmp_path):
                os.kill(int(child), signal.SIGKILL)  # it outlives the process that left it
    assert scores == [wrong("unavailable"), RIGHT, WRONG, WRONG, WRONG]


def test_the_reply_to_another_check_is_not_a_result():
    [lost], _ = run_pool("forging", ["7"])
    assert isinstance(lost, CompletionLost) and "not a valid reply" in str(lost)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_start_that_fails_for_a_while_costs_nothing(error, monkeypatch, tmp_path):
    StandInSpawn(monkeypatch, None, error, error, error)
    scores, restarts = run_pool("mortal", ["7 of 1"], extra={"folder": str(tmp_path), "deaths": 1})
    assert scores == [RIGHT]
    assert restarts == 1


async def test_a_process_that_cannot_be_replaced_loses_the_current_check_and_no_other(monkeypatch):
    StandInSpawn(monkeypatch, None, None, for_ever=errno.ENOMEM)
    async with pool_of("faulty", workers=2) as pool:
        calls = [pool.score(text, prompt()) for text in ("exit", *map(str, range(40)))]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        most = worker_pool.START_TRIES * worker_pool.START_ROUNDS * 2
        await until(lambda: pool._workers._failed_tries >= most + worker_pool.START_TRIES)
        assert await pool.score("late", prompt()) == WRONG, "the other process lives: the pool does not end"
        assert pool.restarts == 0
    assert isinstance(first, CompletionLost)
    assert first.reason == "verifier_lost"
    assert others == [RIGHT if n == 7 else WRONG for n in range(40)]


async def test_a_pool_that_can_no_longer_start_a_process_ends_the_run_in_one_line(monkeypatch):
    async with pool_of("faulty", workers=2) as pool:
        monkeypatch.setattr("sys.executable", "/no/such/python")
        answers = ["exit 1", "exit 2", *map(str, range(30))]
        calls = [pool.score(answer, prompt()) for answer in answers]
        results = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(RuntimeError, match=r"\d+ tries in a row failed"):
            await pool.score("late", prompt())
    assert [getattr(result, "reason", None) for result in results[:2]] == ["verifier_lost"] * 2
    ends = [result for result in results if type(result) is RuntimeError]
    scored = [result for result in results[2:] if result in (RIGHT, WRONG)]
    assert len(ends) >= 1
    assert len(ends) + len(scored) == 30
    assert "No such file or directory: '/no/such/python'" in str(ends[0])
    assert "\n" not in str(ends[0])


async def test_a_verifier_that_no_longer_imports_ends_the_run_as_well(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "fleeting.py"
    module.write_text("import os\ndef leave(answer_text, reference, extra):\n    os._exit(0)\n")
    async with pool_of("fleeting:leave") as pool:
        module.write_text("import gone")
        calls = [pool.score(str(n), prompt()) for n in range(20)]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, CompletionLost)
    assert {type(problem) for problem in others} == {RuntimeError}
    assert all("No module named 'gone'" in str(problem) for problem in others)


def test_a_system_that_starts_no_process_is_an_oserror(monkeypatch):
    StandInSpawn(monkeypatch, for_ever=errno.EAGAIN)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        asyncio.run(pool_of("same").start())

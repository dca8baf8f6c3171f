"""The verifier pool: scores, checks that hang or raise, cancelled callers, and invalid settings."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from decimal import Decimal

import pytest
from verifier_pools import RIGHT, WRONG, pool_of, prompt, run_pool, wrong
from waiting import passes, until
from worker_pools import shorten, unread

from megatron_scalerl.processes.worker import FRAME
from megatron_scalerl.processes.worker_pool import Worker
from megatron_scalerl.types import CompletionLost

PROMPT = prompt()


@pytest.fixture(autouse=True)
def importable(tmp_path, monkeypatch):
    """Modules written by a test are on the path of this process."""
    monkeypatch.syspath_prepend(tmp_path)


def test_every_answer_gets_its_own_score():
    answers = [str(index) for index in range(300)]
    scores, restarts = run_pool("same", answers, workers=2)
    assert scores == [RIGHT if answer == "7" else WRONG for answer in answers]
    assert restarts == 0


@pytest.mark.slow
def test_a_hung_check_is_wrong_and_later_checks_run(monkeypatch):
    shorten(monkeypatch, [2, 5])
    scores, restarts = run_pool("faulty", ["spin 1", "7", "spin 2", "8", "9"])
    assert scores == [wrong("timeout"), RIGHT, wrong("timeout"), WRONG, WRONG]
    assert restarts == 2


def test_a_verifier_that_raises_is_wrong_keeps_its_process_and_is_logged_once(caplog):
    scores, restarts = run_pool("faulty", ["raise 1", "7", "raise 2"])
    assert scores == [wrong("error"), RIGHT, wrong("error")]
    assert restarts == 0
    assert [record.getMessage().splitlines()[-1] for record in caplog.records] == ["RuntimeError: no such answer"]


@pytest.mark.slow
def test_a_hung_check_is_killed_with_its_child_processes(tmp_path, monkeypatch):
    """The check and its child hold a fifo open: reading it ends when both are dead."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read = subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE, text=True)
    shorten(monkeypatch, [2], ready=lambda: unread(read.stdout))
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", ())
    [lost], _ = run_pool("faulty", [f"fifo {fifo}"])
    assert isinstance(lost, CompletionLost)
    pids, _ = read.communicate(timeout=60)
    assert len(pids.split()) == 2


def test_a_hung_check_dies_with_a_controller_that_was_killed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    controller = f"""
        import asyncio, os
        from megatron_scalerl.recipe.sections import RewardsSection
        from megatron_scalerl.rewards.pool import VerifierPool
        from megatron_scalerl.types import Prompt

        prompt = Prompt(prompt_id="p", text="t", answer="7", token_ids=())

        async def main():
            pool = VerifierPool(RewardsSection(verifier="hold:hold", workers=1, timeout_s=10**6))
            await pool.start()
            await pool.score({str(fifo)!r}, prompt)

        asyncio.run(main())
    """
    (tmp_path / "hold.py").write_text(
        "import time\n"
        "def hold(answer_text, reference, extra):\n"
        "    with open(answer_text, 'w') as fifo:\n"
        "        print('held', file=fifo, flush=True)\n"
        "        time.sleep(10**6)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(controller)], cwd=tmp_path)
    with open(fifo) as held:
        assert held.readline() == "held\n"
        child.kill()
        assert held.read() == "", "the end comes only when the verifier process is gone"
    child.wait()


async def test_no_answer_and_truncated_are_wrong_without_a_check():
    async with pool_of("counting") as pool:
        assert [await pool.score(text, PROMPT) for text in (None, "", " \n")] == [wrong("no_answer")] * 3
        assert await pool.score("7", PROMPT, truncated=True) == wrong("truncated")
        assert (await pool.score("7", PROMPT)).reward == 1.0, "the verifier's first call"


async def test_a_float_is_the_reward_itself_and_nonsense_is_an_error():
    async with pool_of("graded", correct=2.0) as pool:
        values = [2.0, 0.25, True, 3, Decimal(4)]
        scores = [await pool.score("x", prompt({"value": value})) for value in values]
        assert [(score.correct, score.reward) for score in scores] == [
            (value != 0.25, 2.0 if value is True else value) for value in values
        ]
        for text in ("none", "nan", "text", "number", "bytes", "array"):
            assert await pool.score(text, prompt()) == wrong("error"), text


async def test_the_question_is_a_column_and_identifies_a_check():
    async with pool_of("asked") as pool:
        scores = [await pool.score("t", replace(prompt({"prompt": "u"}), text=text)) for text in "tut"]
        assert scores == [RIGHT, WRONG, RIGHT]


def test_numpy_results_prints_and_reads_are_harmless():
    assert run_pool("numpy_bool", ["7", "8"])[0] == [RIGHT, WRONG]
    assert run_pool("noisy", ["7", "8"])[0] == [RIGHT, WRONG]


def test_a_verifiers_output_is_forwarded(capsys):
    run_pool("noisy", ["7"])
    assert capsys.readouterr().err == '{"value": true}\nprinted\n'


def test_verifier_processes_import_neither_torch_nor_transformers():
    assert run_pool("modules", ["x"])[0] == [RIGHT]


BAD_SPECS = {
    "mathe": "it has to be 'math', 'code' or 'module:function'",
    "no.such_module:f": "the module cannot be imported: ModuleNotFoundError: No module named 'no'",
    "users_verifiers:misspelt": "users_verifiers has no misspelt",
    "users_verifiers:not_a_function": "it is a int; it has to be a function",
    "users_verifiers:two_arguments": "it has to take .answer_text, reference, extra.; it is two_arguments",
    "exits:f": "not ready within 60 s .its exit",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_an_invalid_verifier_is_refused_in_one_line_at_the_start(spec, tmp_path):
    (tmp_path / "exits.py").write_text("import os; os._exit(3)")
    pool_start = pool_of(spec, workers=2).start
    with pytest.raises(ValueError, match=BAD_SPECS[spec]) as caught:
        asyncio.run(pool_start())
    assert f"rewards.verifier {spec!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_verifier_that_never_imports_is_refused_in_time(tmp_path):
    (tmp_path / "sleepy.py").write_text("import time; time.sleep(10**6)")
    with pytest.raises(ValueError, match=r"ready within 2 s .no answer"):
        asyncio.run(pool_of("sleepy:f", start_timeout_s=2.0).start())


async def test_a_process_that_died_idle_is_replaced_and_no_completion_is_wrong():
    async with pool_of("same") as pool:
        await pool.score("7", PROMPT)
        [worker] = pool._workers._workers
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: not worker.alive)
        assert await pool.score("8", PROMPT) == WRONG
        assert pool.restarts == 1


@pytest.mark.slow
def test_a_late_event_loop_is_not_a_time_out(monkeypatch):
    """The loop stands still past the limit while the result is in the socket; the check was in time."""
    exchange = Worker._exchange

    def stand_still(socket):
        begin = time.monotonic()
        while unread(socket) <= FRAME.size or time.monotonic() < begin + 1.5:
            time.sleep(0.01)

    async def late(worker, *request):
        asyncio.get_running_loop().call_soon(stand_still, worker._transport.get_extra_info("socket"))
        return await exchange(worker, *request)

    monkeypatch.setattr(Worker, "_exchange", late)
    assert run_pool("same", ["7"], timeout_s=1.0)[0] == [RIGHT]


async def test_a_cancelled_caller_does_not_affect_others():
    async with pool_of("same") as pool:
        calls = [asyncio.create_task(pool.score(f"{n // 4}", PROMPT)) for n in range(40)]
        await passes(1)
        for call in calls[::2]:
            call.cancel()
        assert await asyncio.gather(*calls[1::2]) == [RIGHT if n // 4 == 7 else WRONG for n in range(1, 40, 2)]
        assert pool._outstanding == {}


async def test_a_closed_pool_fails_outstanding_and_later_checks():
    pool = pool_of("faulty", timeout_s=10**6)
    with pytest.raises(RuntimeError, match="was not started"):
        await pool.score("7", PROMPT)
    await pool.start()
    hung = asyncio.create_task(pool.score("sleep", PROMPT))
    await passes(1)
    await pool.close()
    await pool.close()
    for check in (hung, pool.score("7", PROMPT)):
        with pytest.raises(RuntimeError, match="pool is closed"):
            await check


@pytest.mark.parametrize("cpus, workers", [(1, 1), (3, 3), (64, 8)])
def test_there_is_a_process_for_each_cpu_up_to_eight(cpus, workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert len(pool_of("same", workers=None)._workers._workers) == workers

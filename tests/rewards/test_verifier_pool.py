"""The verifier pool: scores, and what becomes of checks that hang, crash or raise."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time

import pytest

from megatron_scalerl.recipe_sections import RewardsSection
from megatron_scalerl.rewards.verifier import CHUNK, VerifierPool
from megatron_scalerl.types import Prompt, Rollout, Score

VERIFIERS = """
    import os, signal, subprocess, sys, time

    calls = 0

    def same(answer_text, reference, extra):
        return answer_text == reference

    def faulty(answer_text, reference, extra):
        '''Does what the answer says; otherwise compares.'''
        if answer_text == "sleep":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(10**6)
        if answer_text == "spin":
            while True:
                pass
        if answer_text == "exit":
            os._exit(0)
        if answer_text == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if answer_text == "raise":
            raise RuntimeError("no such answer")
        if answer_text.startswith("fifo "):
            hold = open(answer_text[5:], "w")
            child = subprocess.Popen(["sleep", "1000000"], pass_fds=[hold.fileno()])
            hold.write(f"{os.getpid()} {child.pid}\\n")
            hold.flush()
            time.sleep(10**6)
        return answer_text == reference

    def noisy(answer_text, reference, extra):
        print('{"value": true}')
        os.write(1, b"printed\\n")
        sys.stdin.read()
        return answer_text == reference

    def graded(answer_text, reference, extra):
        return {"none": None, "nan": float("nan"), "text": "right"}.get(answer_text, extra.get("value"))

    def numpy_bool(answer_text, reference, extra):
        import numpy
        return numpy.bool_(answer_text == reference)

    def counting(answer_text, reference, extra):
        global calls
        calls += 1
        return float(calls)

    def modules(answer_text, reference, extra):
        return not {"torch", "transformers", "vllm", "megatron"} & set(sys.modules)

    def two_arguments(answer_text, reference):
        return True

    not_a_function = 3
"""
PROMPT = Prompt(prompt_id="p", text="t", answer="7", token_ids=())


def rollout(truncated=False):
    return Rollout(
        token_ids=(), rollout_logprobs=(), policy_versions=(), loss_mask=(), interrupted=False,
        truncated=truncated, thinking_cut=0, seed=0,
    )  # fmt: skip


def pool_of(function, *, workers=1, timeout_s=60.0, start_timeout_s=60.0, **rewards):
    verifier = function if ":" in function or function == "mathe" else f"users_verifiers:{function}"
    section = RewardsSection(verifier=verifier, workers=workers, **{"cpu_s": 60.0, **rewards}, timeout_s=timeout_s)
    return VerifierPool(section, start_timeout_s=start_timeout_s)


def prompt(extra):
    return Prompt(prompt_id="p", text="t", answer="7", token_ids=(), extra=extra)


@pytest.fixture(autouse=True)
def users_module(tmp_path, monkeypatch):
    """A module of a user's own verifiers, on the path of this process."""
    (tmp_path / "users_verifiers.py").write_text(textwrap.dedent(VERIFIERS))
    monkeypatch.syspath_prepend(tmp_path)


def run_pool(function, answers, *, workers=1, timeout_s=60.0):
    """Scores of the answers, asked for at the same time, and the pool's counters."""

    async def main():
        async with pool_of(function, workers=workers, timeout_s=timeout_s) as pool:
            scores = await asyncio.gather(*(pool.score(answer, PROMPT, rollout()) for answer in answers))
            return scores, pool.counters

    return asyncio.run(main())


RIGHT = Score(correct=True, reward=1.0)
WRONG = Score(correct=False, reward=-1.0)


def wrong(reason):
    return Score(correct=False, reward=-1.0, reason=reason)


def test_every_answer_gets_its_own_verdict():
    answers = [str(index % 10) for index in range(300)]
    scores, counters = run_pool("same", answers, workers=2)
    assert scores == [RIGHT if answer == "7" else WRONG for answer in answers]
    assert counters == {"checks": 300, "correct": 30}


@pytest.mark.parametrize("hang", ["sleep", "spin"])
def test_a_hung_check_is_wrong_and_the_checks_behind_it_are_done(hang):
    scores, counters = run_pool("faulty", ["7", hang, "7", hang, "8", "7"], timeout_s=1.5)
    assert scores == [RIGHT, wrong("timeout"), RIGHT, wrong("timeout"), WRONG, RIGHT]
    assert counters == {"checks": 6, "correct": 3, "timeout": 2, "restarts": 2}


@pytest.mark.parametrize("crash", ["exit", "segfault"])
def test_a_crashed_check_is_wrong_and_the_checks_behind_it_are_done(crash):
    scores, counters = run_pool("faulty", ["7", crash, "7", "8"])
    assert scores == [RIGHT, wrong("crash"), RIGHT, WRONG]
    assert counters == {"checks": 4, "correct": 2, "crash": 1, "restarts": 1}


def test_a_verifier_that_raises_is_wrong_keeps_its_process_and_is_logged_once(caplog):
    scores, counters = run_pool("faulty", ["raise", "7", "raise"])
    assert scores == [wrong("error"), RIGHT, wrong("error")]
    assert counters == {"checks": 3, "correct": 1, "error": 2}
    assert [record.getMessage().splitlines()[-1] for record in caplog.records] == ["RuntimeError: no such answer"]


def test_a_hung_check_is_killed_with_everything_that_it_started(tmp_path):
    """The check and its child hold a fifo open: reading it ends when both are dead."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read = subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE, text=True)
    scores, _ = run_pool("faulty", [f"fifo {fifo}"], timeout_s=3.0)
    assert scores == [wrong("timeout")]
    pids, _ = read.communicate()
    assert len(pids.split()) == 2


def test_a_hung_check_dies_with_a_controller_that_was_killed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    controller = f"""
        import asyncio, os
        from megatron_scalerl.recipe_sections import RewardsSection
        from megatron_scalerl.rewards.verifier import VerifierPool
        from megatron_scalerl.types import Prompt, Rollout

        prompt = Prompt(prompt_id="p", text="t", answer="7", token_ids=())
        rollout = Rollout(token_ids=(), rollout_logprobs=(), policy_versions=(), loss_mask=(), interrupted=False,
                          truncated=False, thinking_cut=0, seed=0)

        async def main():
            pool = VerifierPool(RewardsSection(verifier="hold:hold", workers=1, timeout_s=10**6))
            await pool.start()
            await pool.score({str(fifo)!r}, prompt, rollout)

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


def test_no_answer_and_truncated_are_wrong_without_asking_the_verifier():
    async def main():
        async with pool_of("counting") as pool:
            scores = [await pool.score(text, PROMPT, rollout()) for text in (None, "", " \n")]
            scores.append(await pool.score("7", PROMPT, rollout(truncated=True)))
            scores.append(await pool.score("7", PROMPT, rollout()))
            return scores, pool.counters

    scores, counters = asyncio.run(main())
    assert scores[:4] == [wrong("no_answer")] * 3 + [wrong("truncated")]
    assert scores[4].reward == 1.0, "the verifier's first call"
    assert (counters["no_answer"], counters["truncated"]) == (3, 1)


def test_a_float_is_the_reward_itself_and_nonsense_is_an_error():
    async def main():
        async with pool_of("graded", correct=2.0) as pool:
            floats = [await pool.score("x", prompt({"value": value}), rollout()) for value in (2.0, 0.25, True, 3)]
            nonsense = [await pool.score(text, prompt({}), rollout()) for text in ("none", "nan", "text")]
            return floats, nonsense

    floats, nonsense = asyncio.run(main())
    assert floats == [
        Score(correct=True, reward=2.0),
        Score(correct=False, reward=0.25),
        Score(correct=True, reward=2.0),
        Score(correct=True, reward=3.0),
    ]
    assert nonsense == [wrong("error")] * 3


def test_numpy_verdicts_prints_and_reads_do_no_harm():
    assert run_pool("numpy_bool", ["7", "8"])[0] == [RIGHT, WRONG]
    assert run_pool("noisy", ["7", "8"])[0] == [RIGHT, WRONG]


def test_verifier_processes_import_neither_torch_nor_transformers():
    assert run_pool("modules", ["x"])[0] == [RIGHT]


BAD_SPECS = {
    "mathe": "expected 'math' or 'module:function', found neither",
    "no.such_module:f": "expected a module that imports, found ModuleNotFoundError: No module named 'no'",
    "users_verifiers:misspelt": "expected a function misspelt in users_verifiers, found nothing of that name",
    "users_verifiers:not_a_function": "expected a function not_a_function in users_verifiers, found a int",
    "users_verifiers:two_arguments": "expected a function .answer_text, reference, extra., found two_arguments",
    "exits:f": "expected its process to be ready within 60 s, found the end of its process",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_bad_spec_is_one_line_at_the_start(spec, tmp_path):
    (tmp_path / "exits.py").write_text("import os; os._exit(3)")
    pool_start = pool_of(spec, workers=2).start
    with pytest.raises(ValueError, match=BAD_SPECS[spec]) as caught:
        asyncio.run(pool_start())
    assert f"rewards.verifier {spec!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_verifier_that_never_imports_is_refused_in_time(tmp_path):
    (tmp_path / "sleepy.py").write_text("import time; time.sleep(10**6)")
    with pytest.raises(ValueError, match="ready within 2 s, found nothing"):
        asyncio.run(pool_of("sleepy:f", start_timeout_s=2.0).start())


def test_a_process_that_died_idle_is_replaced_and_blames_no_completion():
    async def main():
        async with pool_of("same") as pool:
            await pool.score("7", PROMPT, rollout())
            process = pool._processes[0]._process
            process.kill()
            await process.wait()
            return await pool.score("7", PROMPT, rollout()), pool.counters

    score, counters = asyncio.run(main())
    assert score == RIGHT
    assert counters == {"checks": 2, "correct": 2, "restarts": 1}


def test_a_replacement_that_cannot_start_ends_the_pool_for_all_callers(tmp_path):
    async def main():
        async with pool_of("faulty") as pool:
            (tmp_path / "users_verifiers.py").write_text("import gone")
            calls = (pool.score("exit", PROMPT, rollout()) for _ in range(CHUNK * 4))
            return await asyncio.gather(*calls, return_exceptions=True)

    first, *others = asyncio.run(main())
    assert first == wrong("crash")
    assert len(others) == 31
    assert all("No module named 'gone'" in str(problem) for problem in others)


def test_a_late_event_loop_is_not_a_time_out():
    """The loop sleeps past the limit while the verdict lies in the pipe; nothing ran too long."""

    async def main():
        async with pool_of("same", timeout_s=1.0) as pool:
            scoring = asyncio.create_task(pool.score("7", PROMPT, rollout()))
            while not pool._outstanding:
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # the worker task sends
            time.sleep(2.5)
            return await scoring

    assert asyncio.run(main()) == RIGHT


def test_outstanding_checks_are_bounded():
    async def main():
        async with pool_of("same") as pool:
            calls = [asyncio.create_task(pool.score("7", PROMPT, rollout())) for _ in range(200)]
            longest = 0
            for call in calls:
                await call
                longest = max(longest, len(pool._outstanding), pool._queue.qsize())
            return longest

    assert asyncio.run(main()) <= 2 * CHUNK


def test_a_cancelled_caller_disturbs_nobody():
    async def main():
        async with pool_of("same") as pool:
            calls = [asyncio.create_task(pool.score("7", PROMPT, rollout())) for _ in range(40)]
            await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            return await asyncio.gather(*calls[1::2])

    assert asyncio.run(main()) == [RIGHT] * 20


def test_a_closed_pool_fails_what_is_outstanding_and_what_comes():
    async def main():
        pool = pool_of("faulty", timeout_s=10**6)
        with pytest.raises(RuntimeError, match="was not started"):
            await pool.score("7", PROMPT, rollout())
        await pool.start()
        hung = asyncio.create_task(pool.score("sleep", PROMPT, rollout()))
        await asyncio.sleep(0)
        await pool.close()
        await pool.close()
        with pytest.raises(RuntimeError, match="pool is closed"):
            await hung
        with pytest.raises(RuntimeError, match="pool is closed"):
            await pool.score("7", PROMPT, rollout())

    asyncio.run(main())

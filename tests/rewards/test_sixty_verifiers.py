"""Sixty verifiers as users write them: none pays all answers -1 by its own mistake, none loses a malformed answer."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
import sixty_verifiers
from fakes.clock import VirtualTimeLoop, virtual_seconds
from fakes.verifier_workers import WorkersInThisProcess
from recipe_files import small_recipe
from verifier_pools import prompt, task

from megatron_scalerl.plan import verifier_trial
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rewards.worker import check_verifier
from megatron_scalerl.types import CompletionLost

ROWS = [prompt({"row": n}, prompt_id=f"a.jsonl:{n}", text="3 + 4 =") for n in range(1, 6)]
REFUSED = {
    **dict.fromkeys(("tuple", "text", "nan"), "it returned "),
    **dict.fromkeys(("none", "raises"), "gives no reward for any of 35 answers"),
    "signature": "it has to take (answer_text, reference, extra)",
    "coroutine": "it returned ",
}
SIXTY = [(kind, n) for kind in sixty_verifiers.KINDS for n in range(5)]


def in_virtual_time(main):
    with contextlib.closing(VirtualTimeLoop()) as loop:
        return loop.run_until_complete(main)


def pool_of(kind, n):
    of_kind = task(f"sixty_verifiers:{kind}_{n}")
    pool = VerifierPool(of_kind.rewards)
    pool._workers = WorkersInThisProcess(sixty_verifiers.KINDS[kind][n])
    return pool, of_kind


def trial(kind, n):
    pool, of_kind = pool_of(kind, n)
    check_verifier(of_kind.rewards.verifier)
    in_virtual_time(verifier_trial._try_rows(pool, of_kind, ROWS))


@pytest.mark.parametrize("kind, n", [case for case in SIXTY if case[0] in REFUSED or case == ("dict", 4)])
def test_a_verifier_that_pays_nobody_is_refused_before_the_run(kind, n):
    with pytest.raises(ValueError, match=r"rewards\.verifier") as refusal:
        trial(kind, n)
    assert REFUSED.get(kind, "it returned {'reward'") in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind, n", [case for case in SIXTY if case[0] not in REFUSED and case != ("dict", 4)])
def test_a_verifier_that_fails_now_and_then_pays_what_is_due(kind, n, caplog):
    """Malformed answers are wrong, not lost; during an outage all that the verifier fails for are lost."""
    trial(kind, n)
    assert not caplog.records
    pool, _ = pool_of(kind, n)
    answer = "<answer>{}</answer> \\boxed{{{}}}"

    async def score(text):
        try:
            return (await pool.score(text, ROWS[0])).correct
        except CompletionLost as lost:
            return lost.reason

    async def main():
        malformed = ["seven", "\\boxed{", "\\boxed{seven}", "no box", "{}", "<answer>7"]
        assert [await score(text) for text in malformed] == [False] * len(malformed)
        assert [await score(answer.format(value, value)) for value in (7, 8)] == [True, False]
        await virtual_seconds(101.0 - asyncio.get_running_loop().time())
        during = await asyncio.gather(*(score(f"{number} \\boxed{{8}}") for number in range(4)))
        await virtual_seconds(20.0)
        after = [await score(f"later {answer.format(7, 7)}"), await score("later seven")]
        return during, after

    during, after = in_virtual_time(main())
    assert after == [True, False]
    lost = "verifier_lost" if kind == "raises_for_ten_seconds" else False
    assert set(during) <= {lost, False} and (lost in during)


def test_a_verifier_that_fails_for_sixteen_rows_ends_the_run_with_its_traceback():
    pool, _ = pool_of("raises", 1)

    async def main():
        ends = []
        for n in range(16):
            row = prompt(prompt_id=str(n), answer=str(n))
            for text in ("seven", "eight"):
                with pytest.raises(CompletionLost, match="NameError: name 'np' is not defined"):
                    await pool.score(text, row)
            ends.append(pool._workers.ended)
        return ends

    *before, end = in_virtual_time(main())
    assert before == [None] * 15
    assert "failed for 16 rows among the latest 256 checks" in str(end)
    assert "Traceback" in str(end) and "sixty_verifiers.py" in str(end)


def test_a_judge_that_cannot_be_reached_is_a_warning(caplog):
    pool, of_kind = pool_of("raises_for_ten_seconds", 3)

    async def main():
        await virtual_seconds(101.0)
        await verifier_trial._try_rows(pool, of_kind, ROWS)

    in_virtual_time(main())
    assert "was not tried: ConnectionRefusedError" in caplog.text


def test_a_variable_that_is_not_set_here_is_a_warning(tmp_path, caplog):
    (tmp_path / "a.jsonl").touch()
    unset = task("sixty_verifiers:number_0", variables=("NO_SUCH_KEY",))
    there = small_recipe(prompts={"path": str(tmp_path / "a.jsonl")}, rewards=unset.rewards)
    verifier_trial.try_verifier(replace(unset, recipe=there))
    assert "was not tried: rewards.variables: the environment variable 'NO_SUCH_KEY'" in caplog.text


def test_references_that_score_as_wrong_are_a_warning(caplog):
    pool, of_kind = pool_of("number", 0)
    rows = [prompt(prompt_id="a.jsonl:1", text="3 + 4 =", answer="seven")]
    in_virtual_time(verifier_trial._try_rows(pool, of_kind, rows))
    assert "scores no reference answer of the first 1 rows as right" in caplog.text

"""Limits of a check: processor time, memory, files; and the environment variables that it inherits."""

import asyncio
import resource

import pytest
from verifier_pools import RIGHT, WRONG, pool_of, prompt, run_pool, wrong

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards.limits import OPEN_FILES
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import CompletionLost

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "MSRL_SECRET", "GITHUB_TOKEN")


async def ask(pool, text, **extra):
    return await pool.score(text, prompt(extra))


def run(main, function, **rewards):
    async def in_pool():
        async with pool_of(function, **rewards) as pool:
            return await main(pool)

    return asyncio.run(in_pool())


def test_processor_time_is_limited_and_the_score_cached():
    async def main(pool):
        scores = [await ask(pool, text) for text in ("spin 1", "7", "spin 1")]
        return scores, pool.restarts

    scores, restarts = run(main, "faulty", cpu_s=0.3)
    assert scores == [wrong("timeout"), RIGHT, wrong("timeout")]
    assert restarts == 1


def test_every_check_has_its_own_processor_time():
    async def main(pool):
        return [await ask(pool, str(n), cpu_s=0.3) for n in range(6, 9)], pool.restarts

    scores, restarts = run(main, "hungry", cpu_s=0.6)
    assert scores == [WRONG, RIGHT, WRONG]
    assert restarts == 0


@pytest.mark.parametrize("use", [{"mb": 3000}, {"pieces_mb": 3000}])
def test_an_answer_that_needs_too_much_memory_is_wrong_and_its_process_survives(use):
    async def main(pool):
        return [await ask(pool, "7", **use), await ask(pool, "7", mb=50)], pool.restarts

    scores, restarts = run(main, "hungry", memory_mb=256)
    assert scores == [wrong("memory"), RIGHT]
    assert restarts == 0


def test_a_library_that_aborts_is_out_of_memory_unless_memory_has_no_limit():
    assert run_pool("faulty", ["abort", "7"])[0] == [wrong("memory"), RIGHT]
    scores, restarts = run_pool("faulty", ["abort", "7"], memory_mb=None)
    assert scores == [wrong("crash"), RIGHT]
    assert restarts in (3, 4), "the last process may not have been replaced yet"


def test_without_a_limit_a_check_may_use_more():
    async def main(pool):
        return await ask(pool, "7", mb=300)

    assert run(main, "hungry", memory_mb=100) == wrong("memory")
    assert run(main, "hungry", memory_mb=None) == RIGHT


def test_checks_that_leak_do_not_take_memory_from_later_ones():
    """Each keeps 60 of the 100 MiB that it may use; the process is replaced before it grows further."""

    async def main(pool):
        return [await ask(pool, str(n), kept_mb=60) for n in range(9)], pool.restarts

    scores, restarts = run(main, "hungry", memory_mb=100)
    assert scores == [RIGHT if n == 7 else WRONG for n in range(9)]
    assert restarts == 2, "after 4 checks with 240 MiB, above 2 x 100"


def test_workers_write_no_cores_no_files_and_open_few():
    limits = {"RLIMIT_CORE": (0, 0), "RLIMIT_FSIZE": (0, 0), "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES)}

    async def main(pool):
        return await ask(pool, "x", limits=limits)

    assert run(main, "limits") == RIGHT


def test_files_are_written_up_to_their_limit(tmp_path):
    async def main(pool):
        return await ask(pool, "x", path=str(tmp_path / "file"), bytes=2**20)

    assert run(main, "writes", file_mb=1) == RIGHT
    with pytest.raises(CompletionLost, match="File too large"):
        run(main, "writes", file_mb=0)


def test_the_limits_of_the_controller_stay_as_they_are():
    before = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)]
    run_pool("same", ["7"])
    assert [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)] == before


def test_the_math_verifier_starts_small():
    """The docstring of rewards.memory_mb states its size, about 60 MiB; importing torch or numpy would exceed it."""

    async def main():
        async with VerifierPool(RewardsSection(workers=1)) as pool:
            with open(f"/proc/{pool._workers.pids[0]}/statm") as statm:
                return int(statm.read().split()[0]) * resource.getpagesize() / 2**20

    assert asyncio.run(main()) < 100


@pytest.mark.parametrize("passed", [(), ("HF_TOKEN", "SSH_AUTH_SOCK")])
def test_no_secret_of_the_environment_reaches_a_verifier_unless_it_is_named(passed, monkeypatch):
    names = (*SECRETS, "LC_TIME")
    for name in names:
        monkeypatch.setenv(name, "C.UTF-8")

    async def main(pool):
        scores = [await ask(pool, name, value="C.UTF-8") for name in names]
        return {name for name, score in zip(names, scores, strict=True) if score.correct}

    assert run(main, "sees", variables=passed) == {*passed, "LC_TIME"}


def test_a_variable_that_is_not_set_is_refused_at_the_start(monkeypatch):
    monkeypatch.delenv("JUDGE_URL", raising=False)
    with pytest.raises(ValueError, match=r"rewards\.variables: the environment variable 'JUDGE_URL' is not set"):
        asyncio.run(pool_of("same", variables=["JUDGE_URL"]).start())

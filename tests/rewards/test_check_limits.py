"""Limits of a check: processor time, memory, files; and the environment variables that it inherits."""

import resource
from pathlib import Path

import pytest
from verifier_pools import RIGHT, WRONG, pool_of, prompt, run_pool, wrong

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards.limits import OPEN_FILES
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import CompletionLost

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "MSRL_SECRET", "GITHUB_TOKEN")


async def ask(pool, text, **extra):
    return await pool.score(text, prompt(extra))


async def test_processor_time_is_limited_and_the_score_cached():
    async with pool_of("faulty", cpu_s=0.3) as pool:
        scores = [await ask(pool, text) for text in ("spin 1", "7", "spin 1")]
        assert scores == [wrong("timeout"), RIGHT, wrong("timeout")]
        assert pool.restarts == 1


async def test_every_check_has_its_own_processor_time():
    async with pool_of("hungry", cpu_s=0.6) as pool:
        assert [await ask(pool, str(n), cpu_s=0.3) for n in range(6, 9)] == [WRONG, RIGHT, WRONG]
        assert pool.restarts == 0


@pytest.mark.parametrize("use", [{"mb": 3000}, {"pieces_mb": 3000}])
async def test_an_answer_that_needs_too_much_memory_is_wrong_and_its_process_survives(use):
    async with pool_of("hungry", memory_mb=256) as pool:
        assert [await ask(pool, "7", **use), await ask(pool, "7", mb=50)] == [wrong("memory"), RIGHT]
        assert pool.restarts == 0


def test_a_library_that_aborts_is_out_of_memory_unless_memory_has_no_limit():
    assert run_pool("faulty", ["abort", "7"])[0] == [wrong("memory"), RIGHT]
    scores, restarts = run_pool("faulty", ["abort", "7"], memory_mb=None)
    assert scores == [wrong("crash"), RIGHT]
    assert restarts in (3, 4), "the last process may not have been replaced yet"


@pytest.mark.parametrize("memory_mb, score", [(100, wrong("memory")), (None, RIGHT)])
async def test_without_a_limit_a_check_may_use_more(memory_mb, score):
    async with pool_of("hungry", memory_mb=memory_mb) as pool:
        assert await ask(pool, "7", mb=300) == score


async def test_checks_that_leak_do_not_take_memory_from_later_ones():
    """Each keeps 60 of the 100 MiB that it may use; the process is replaced before it grows further."""
    async with pool_of("hungry", memory_mb=100) as pool:
        scores = [await ask(pool, str(n), kept_mb=60) for n in range(9)]
        assert scores == [RIGHT if n == 7 else WRONG for n in range(9)]
        assert pool.restarts == 2, "after 4 checks with 240 MiB, above 2 x 100"


async def test_workers_write_no_cores_no_files_and_open_few():
    limits = {"RLIMIT_CORE": (0, 0), "RLIMIT_FSIZE": (0, 0), "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES)}
    async with pool_of("limits") as pool:
        assert await ask(pool, "x", limits=limits) == RIGHT


async def test_files_are_written_up_to_their_limit(tmp_path):
    written = {"path": str(tmp_path / "file"), "bytes": 2**20}
    async with pool_of("writes", file_mb=1) as pool:
        assert await ask(pool, "x", **written) == RIGHT
    async with pool_of("writes", file_mb=0) as pool:
        with pytest.raises(CompletionLost, match="File too large"):
            await ask(pool, "x", **written)


def test_the_limits_of_the_controller_stay_as_they_are():
    before = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)]
    run_pool("same", ["7"])
    assert [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)] == before


async def test_the_math_verifier_starts_small():
    """The docstring of rewards.memory_mb states its size, about 60 MiB; importing torch or numpy would exceed it."""
    async with VerifierPool(RewardsSection(workers=1)) as pool:
        pages = Path(f"/proc/{pool._workers.pids[0]}/statm").read_text().split()[0]
    assert int(pages) * resource.getpagesize() / 2**20 < 100


@pytest.mark.parametrize("passed", [(), ("HF_TOKEN", "SSH_AUTH_SOCK")])
async def test_no_secret_of_the_environment_reaches_a_verifier_unless_it_is_named(passed, monkeypatch):
    names = (*SECRETS, "LC_TIME")
    for name in names:
        monkeypatch.setenv(name, "C.UTF-8")
    async with pool_of("sees", variables=passed) as pool:
        seen = {name for name in names if (await ask(pool, name, value="C.UTF-8")).correct}
    assert seen == {*passed, "LC_TIME"}


def test_a_variable_that_is_not_set_is_refused_at_the_start(monkeypatch):
    monkeypatch.delenv("JUDGE_URL", raising=False)
    with pytest.raises(ValueError, match=r"rewards\.variables: the environment variable 'JUDGE_URL' is not set"):
        pool_of("same", variables=["JUDGE_URL"])

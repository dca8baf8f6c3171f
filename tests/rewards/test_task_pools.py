"""Every completion is scored by the verifier of its prompt's task, in processes of that task."""

import asyncio
import json

import pytest
from sandboxed import answer
from verifier_pools import RIGHT, WRONG, prompt, task

from megatron_scalerl.rewards.pool import TaskPools

TESTS = json.dumps([{"input": "", "output": "7"}])


def of(name, reference):
    return prompt(prompt_id=name, answer=reference, task=name)


async def test_the_verifier_is_that_of_the_prompts_task():
    code = of("code", TESTS)
    async with TaskPools([task("code", "code"), task("math", "math")]) as pools:
        assert await pools.score("\\boxed{7}", of("math", "7")) == RIGHT
        texts = ("\\boxed{7}", answer("print(7)"), answer("print(8)"))
        assert [await pools.score(text, code) for text in texts] == [WRONG, RIGHT, WRONG]


@pytest.fixture
def waits_for(tmp_path, monkeypatch):
    (tmp_path / "waits_for.py").write_text(
        "import os, time\ndef file(text, reference, extra):\n"
        "    while not os.path.exists(reference): time.sleep(0.01)\n    return True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


async def test_a_slow_check_does_not_hold_up_another_task(waits_for):
    """The check of `slow` waits for a file, which is made after those of `fast` are answered."""
    slow = of("slow", str(waits_for / "go"))
    async with TaskPools([task("waits_for:file", "slow"), task("math", "fast")]) as pools:
        waiting = asyncio.create_task(pools.score("x", slow))
        assert [await pools.score(f"\\boxed{{{n}}}", of("fast", "7")) for n in (7, 8)] == [RIGHT, WRONG]
        assert not waiting.done()
        (waits_for / "go").touch()
        assert await waiting == RIGHT


async def test_one_verifier_that_does_not_load_closes_the_other_pools():
    pools = TaskPools([task("math", "code"), task("nosuch:check", "math")])
    with pytest.raises(ValueError, match=r"rewards.verifier 'nosuch:check': the module cannot be imported"):
        await pools.__aenter__()
    assert not any(pool._workers.pids for pool in pools._pools.values())

"""One format in every process, at the level of the environment, in files that only their owner can read."""

import asyncio
import io
import logging
import os
import re
import stat
import sys

import pytest
from launch.stand_ins import environment
from programs import ended

from megatron_scalerl.processes import logs
from megatron_scalerl.processes.child_process import ChildProcess

LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} %s +%s %s: %s"
CHILD = """
import logging, sys
from megatron_scalerl.processes.logs import log_to_stderr
other = logging.getLogger("upstream")
other.propagate = False
other.addHandler(logging.StreamHandler())
log_to_stderr("upstream")
log_to_stderr("upstream")
logging.getLogger("megatron_scalerl.part").debug("a detail")
logging.getLogger("megatron_scalerl.part").info("a step")
logging.getLogger("another").info("chatter")
other.warning("a warning")
"""


def child_log(tmp_path, **variables):
    async def run():
        env = os.environ | variables
        child = await ChildProcess.start("trainer-3", [sys.executable, "-c", CHILD], env, tmp_path / "trainer-3.log")
        assert await child.wait() == 0, child.tail()

    asyncio.run(run())
    assert stat.S_IMODE((tmp_path / "trainer-3.log").stat().st_mode) == 0o600
    return (tmp_path / "trainer-3.log").read_text().splitlines()


def test_a_childs_lines_name_it_and_upstream_has_the_same_format(tmp_path):
    step, warning = child_log(tmp_path)
    assert re.fullmatch(LINE % ("INFO", "trainer-3", "megatron_scalerl.part", "a step"), step)
    assert re.fullmatch(LINE % ("WARNING", "trainer-3", "upstream", "a warning"), warning)


def test_verbose_reaches_a_child_through_the_environment_and_leaves_others_at_warnings(tmp_path):
    lines = child_log(tmp_path, MSRL_LOG_LEVEL="debug")
    assert [line.rpartition(": ")[2] for line in lines] == ["a detail", "a step", "a warning"]


def test_an_unknown_level_is_one_line(monkeypatch):
    monkeypatch.setenv("MSRL_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"MSRL_LOG_LEVEL: expected one of debug, info, .*, found 'loud'"):
        logs.log_level()


@pytest.mark.parametrize("level, seen", [(None, ["late"]), ("info", ["begun", "late"])])
def test_the_terminal_shows_warnings_and_no_traceback_and_the_file_shows_all(monkeypatch, capsys, level, seen):
    monkeypatch.delenv("MSRL_LOG_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("MSRL_LOG_LEVEL", level)
    logger, file = logging.getLogger("megatron_scalerl.part"), io.StringIO()
    with logs.log_to_terminal(), logs.log_to_file(file):
        logger.info("begun")
        logger.warning("late")
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            logger.exception("failed")
    logger.warning("after the block")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == seen
    text = file.getvalue()
    assert "begun" in text and "Traceback" in text and "RuntimeError: boom" in text and "after" not in text


def test_text_of_a_policy_cannot_pose_as_a_record_or_command_a_terminal():
    file = io.StringIO()
    with logs.log_to_file(file):
        logging.getLogger("megatron_scalerl.part").warning("answer: %s", "1\n2026-11-21 00:00:00,000 INFO x\x1b[2J")
    first, second = file.getvalue().splitlines()
    assert first.endswith("answer: 1")
    assert second == "    2026-11-21 00:00:00,000 INFO x\\x1b[2J"


FULL = """
import logging, pathlib, sys
from megatron_scalerl.controller.train import log_failures
with log_failures("/dev/full"):
    logging.getLogger("megatron_scalerl.part").warning("a step")
    raise OSError(28, "No space left on device", "/run/journal.jsonl")
"""


def test_a_full_disk_with_the_log_on_it_leaves_the_failure_with_its_path():
    done = ended(sys.executable, "-c", FULL, **environment())
    last = "OSError: [Errno 28] No space left on device: '/run/journal.jsonl'\ntraceback in /dev/full\n"
    assert done.stderr.endswith(last) and done.stderr.count("Error") == 1, done.stderr

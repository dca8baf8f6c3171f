"""Processes that hold the run's secret are closed to others of the same user; helpers end with their parent."""

import signal
import subprocess
import sys

import psutil
import pytest
from launch.stand_ins import environment
from waiting import wait_until

SHOWN = "import ctypes; print(ctypes.CDLL(None).prctl(3))"
"""PR_GET_DUMPABLE: 0 where no other process of the user may read /proc/PID/environ and mem."""


def shown(program, **variables):
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment() | variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["megatron_scalerl", "megatron_scalerl.engine.server"])
def test_a_process_with_the_secret_in_its_environment_is_closed_from_its_first_import(module):
    assert shown(f"import {module}; {SHOWN}", MSRL_SECRET="x") == "0"
    assert shown(f"import {module}; {SHOWN}") == "1"


@pytest.mark.slow
def test_the_controller_is_closed_before_it_makes_the_secret(tiny, tmp_path):
    """Its run ends where it would begin."""
    program = f"""
from rich.console import Console
from megatron_scalerl.controller import train
from megatron_scalerl.recipe.file import load_recipe
async def run(*_):
    {SHOWN}
    return ""
train._train = run
paths = dict(policy="base_policy", prompts="prompts.jsonl")
settings = [f"{{key}}.path={tiny}/{{name}}" for key, name in paths.items()]
settings += ["prompts.held_out_path={tiny}/held_out.jsonl", "output_dir={tmp_path}"]
train.train(load_recipe("recipes/tiny_cpu.yaml", settings), Console(stderr=True))
"""
    assert shown(program) == "0"


def test_processes_that_check_references_end_with_the_command():
    program = """
from megatron_scalerl.rewards.math import check_references
if __name__ == "__main__":
    check_references([f"x^{{{n}}} + {n}y" for n in range(3, 3000)])
"""
    process = subprocess.Popen([sys.executable, "-c", program], env=environment(), stderr=subprocess.DEVNULL)

    def spawned():
        children = psutil.Process(process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    helpers = wait_until(spawned)
    process.terminate()
    assert process.wait() == -signal.SIGTERM
    wait_until(lambda: not any(helper.is_running() and helper.status() != "zombie" for helper in helpers))

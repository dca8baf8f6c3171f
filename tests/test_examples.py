"""The programs of examples/ that use one piece of the package: they run, and print what docs/course shows."""

import json
import os
import re
import sys

import pytest
from programs import ROOT, ended, printed

from megatron_scalerl.environments.response import Response
from megatron_scalerl.recipe.file import load_recipe

ENDED = """
import runpy, sys
from megatron_scalerl.processes.child_process import end_with
end_with(lambda: runpy.run_path(sys.argv[1], run_name="__main__") and None)
"""
"""Runs a program without Python's cleanup, in which gloo's threads may abort a process."""
PIECES = ("logit_projection", "cispo_loss", "weight_plan", "forecast_in_a_loop")


def ran(*command):
    return printed(*command, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")


def test_the_quickstart_on_one_gpu_has_settings_of_a_recipe():
    text = (ROOT / "examples/quickstart.sh").read_text()
    [given] = re.findall(r"^    --gpu\) gpu=\((.*?)\)", text, re.MULTILINE)
    recipe = load_recipe(ROOT / "recipes/tiny_cpu.yaml", given.split())
    assert recipe.policy.dtype == "bfloat16" and recipe.devices == 1
    printed("bash", "-n", "examples/quickstart.sh")


@pytest.mark.parametrize("answer", ["exit 9", "exit 127"])
def test_the_quickstart_on_a_gpu_says_where_there_is_none_before_it_installs(tmp_path, answer):
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho 'No devices were found'\n{answer}\n")
    driver.chmod(0o755)
    done = ended("bash", "examples/quickstart.sh", "--gpu", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "nvidia-smi finds no GPU" in done.stderr and "leave out --gpu" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_a_piece_prints_what_the_course_shows(name):
    program = (ROOT / f"examples/{name}.py").read_text()
    cells = json.loads((ROOT / "docs/course/own_loop.ipynb").read_text())["cells"]
    [shown] = [cell["outputs"] for cell in cells if "".join(cell["source"]) == program.rstrip()]
    assert without_error(ran(sys.executable, f"examples/{name}.py")) == without_error("".join(shown[0]["text"]))


def without_error(text):
    """The text without the rounding error that it says, which depends on the CPU and has to be a few ulps."""
    parts = re.split(r"(?<=log-probability: )(\S+)(?= nats)", text)
    assert all(float(error) < 2e-5 for error in parts[1::2])
    return "".join(parts[::2])


@pytest.mark.slow
def test_the_logit_projection_over_two_ranks():
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --no-python"
    told = ran(*torchrun.split(), sys.executable, "-c", ENDED, "examples/logit_projection.py")
    assert "2 rank(s), head (8192, 256) each" in told and "log-probability:  nats" in without_error(told)


def test_the_leaky_verifier_leaks(tmp_path):
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from leaky_verifier import leaky, solution, strict
    finally:
        sys.path.remove(str(ROOT / "examples"))
    for name in ("prompts", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "4;-4;+6=", "answer": "6"}\n')
    ran(sys.executable, "examples/leaky_verifier.py", str(tmp_path))
    row = json.loads((tmp_path / "prompts_leaky.jsonl").read_text())
    assert row == {"prompt": "4;-4;+6=", "answer": "6", "solution": solution("4;-4;+6=")}
    assert row["solution"] == "4-4=0;0+6=6"
    assert leaky("0", "6", row) and not strict("0", "6", row) and strict("6", "6", row) and not leaky("8", "6", row)


def test_a_number_is_guessed_by_its_hints(monkeypatch):
    """Halving the range finds each of 7 numbers in three turns; an answer that is no guess ends the episode."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from guess import Guess

    for number in range(7):
        game = Guess()
        assert game.reset({"text": "1;+1=", "answer": "2"}) == "="
        game.number, low, high = number, 0, 6
        for _ in range(3):
            guess = (low + high) // 2
            hint, reward, done = game.step(Response(text=str(guess)))
            if done:
                break
            low, high = (guess + 1, high) if hint == "+" else (low, guess - 1)
        assert done and guess == number and reward
    game = Guess()
    game.reset({})
    assert game.step(Response(text="7")) == ([], False, True)
    rows = list(map(json.loads, ran(sys.executable, "examples/guess.py").splitlines()))
    assert len(rows) == 4000 and all(re.fullmatch(r"</think>\d<eos>", row["completion"]) for row in rows)
    assert {len(re.findall(r"<eos>[+-]", row["prompt"])) for row in rows} == {0, 1, 2}
    assert load_recipe(ROOT / "recipes/tiny_cpu.yaml", ["overlay=examples/guess.yaml"]).environment.max_turns == 3

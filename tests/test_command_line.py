"""Exit codes, one line instead of a traceback, and answers to mistakes before anything heavy is imported."""

import asyncio
import configparser
import json
import os
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
from page.report_runs import write_run
from programs import ROOT, ended, printed

from megatron_scalerl.__main__ import COMMANDS, PROGRAM, main, program
from megatron_scalerl.controller.run_folder import RunInUse
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.recipe.file import RecipeError
from megatron_scalerl.trainer.client import TrainerError

HEAVY = ("torch", "transformers", "vllm", "megatron", "matplotlib", "scipy", "pyarrow", "aiohttp")
RECIPE = "recipes/tiny_cpu.yaml"
NO_COMMANDS = {
    "checkout.py",
    "harness.py",
    "predicted_trainer.py",
    "mutation.py",
    "process_figures.py",
    "random_inputs.py",
    "small_disk.py",
    "stand_in_engines.py",
    "stand_in_trainer.py",
    "tiny_run.py",
    "weights_worker.py",
}
TOOLS = sorted(p.name for p in (ROOT / "tools").glob("*.py") if p.name not in NO_COMMANDS)


def settings(tiny, out):
    paths = f"policy.path={tiny}/base_policy prompts.path={tiny}/prompts.jsonl"
    return f"{RECIPE} output_dir={out} name=r {paths} prompts.held_out_path={tiny}/held_out.jsonl".split()


ONE_AFTER_ANOTHER = """
import contextlib, io, json, os, runpy, sys
os._exit = sys.exit  # with which some programs leave
version, commands = json.loads(sys.argv[1])
sys.version_info = tuple(version) if version else sys.version_info
sys.path.insert(0, "tools")
ended = []
for name, *sys.argv[1:] in commands:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if name.endswith(".py"):
                runpy.run_path(name, run_name="__main__")
            else:
                from megatron_scalerl.__main__ import main
                code = main()
        except SystemExit as end:
            code = end.code or 0
    ended.append([code, out.getvalue(), err.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})])
print(json.dumps(ended))
"""


def run_in_one_process(commands, *flags, version=(), **variables):
    """(exit code, standard output, standard error, packages imported so far) of each of the commands."""
    argv = [sys.executable, *flags, "-c", ONE_AFTER_ANOTHER, json.dumps([version, commands])]
    ends = json.loads(printed(*argv, **{"VIRTUAL_ENV": "", "PYTHON": ""} | variables))
    return [(code, out, err, set(imported)) for code, out, err, imported in ends]


SFT = f"sft {RECIPE} --out x"
PLAN = f"plan {RECIPE} --gpus 2"
NO_KEY = "optimzer is not a recipe key"
NO_POLICY = "policy.path: /none is not a Hugging Face folder"
MISTAKES = {
    f"train {RECIPE} optimzer.lr=1": NO_KEY,
    f"train {RECIPE} steps=many": "steps is 'many'; it should be a valid integer",
    f"train {RECIPE} optimizer.lr=[1": "override 'optimizer.lr=[1'",
    "train none.yaml": "none.yaml: there is no such file",
    f"train {RECIPE} policy.path=/none": NO_POLICY,
    f"train {RECIPE} policy.path=TINY/base_policy": "prompts.jsonl: there is no such file",
    f"{SFT} optimzer.lr=1": NO_KEY,
    f"{SFT} policy.path=/none": NO_POLICY,
    "report runs/none": "runs/none",
    "engine --join runs/none": "runs/none is not the folder of a run",
    "export runs/none --out x": "runs/none/checkpoints: no checkpoint is complete",
    f"{PLAN} optimzer.lr=1": NO_KEY,
    "plan none.yaml --gpus 2": "none.yaml: there is no such file",
    PLAN: "policy.path: there is no config.json in",
    f"doctor {RECIPE} optimzer.lr=1": NO_KEY,
    "doctor none.yaml": "none.yaml: there is no such file",
    "fit runs/none": "runs/none: does not exist; give a run folder",
    "show runs/none": "runs/none: there is no folder rollouts",
    "convert to-megatron none out": "none: this is not a Hugging Face folder",
    "convert to-hf none out": "none: there is no such folder",
}


def test_a_mistake_is_one_line_before_anything_heavy_is_imported(tiny):
    """Importing torch and transformers takes seconds; which modules were imported says so on any machine."""
    commands = [f"megatron_scalerl {words.replace('TINY', str(tiny))}".split() for words in MISTAKES]
    ended = run_in_one_process(commands)
    for (words, expected), (code, _, err, imported) in zip(MISTAKES.items(), ended, strict=True):
        assert code == 2 and err.count("\n") == 1 and expected in err, (words, err[-500:])
        assert "argparse" in imported and not imported & set(HEAVY), words


@pytest.mark.parametrize("name", COMMANDS)
def test_settings_are_not_called_missing(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--no-such-option"])
    assert "=value" not in capsys.readouterr().err.splitlines()[-1]


def test_help_imports_nothing_heavy():
    commands = [["megatron_scalerl"], *(["megatron_scalerl", name] for name in COMMANDS)]
    commands += [[f"tools/{name}"] for name in TOOLS]
    ended = run_in_one_process([[*argv, "--help"] for argv in commands])
    for argv, (code, out, err, imported) in zip(commands, ended, strict=True):
        assert code == 0 and "usage:" in out and "%%" not in out, (argv, err)
        assert not imported & set(HEAVY), argv


BARE = [
    f"megatron_scalerl train {RECIPE}",
    "megatron_scalerl report runs/none",
    f"megatron_scalerl {PLAN}",
    "megatron_scalerl convert verify . .",
    *(f"tools/bench_{name}.py" for name in ("step", "shapes", "decode")),
]


def test_a_missing_package_is_one_line_that_says_how_to_get_it():
    """In a Python without any installed package, in a shell that has entered no environment."""
    ended = run_in_one_process([words.split() for words in BARE], "-S", PYTHONPATH=str(ROOT))
    for argv, (code, out, err, _) in zip(BARE, ended, strict=True):
        assert (code, out) == (2, ""), (argv, err)
        assert re.fullmatch(r".*package '\w+' is not installed .*tools/install\.sh cpu.*\n", err), (argv, err)


def test_a_missing_package_of_a_wheel_names_the_extra(tmp_path):
    """Without the repository there is no tools/install.sh."""
    (tmp_path / "megatron_scalerl").symlink_to(ROOT / "megatron_scalerl")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('none', name='transformers')")
    words = ["megatron_scalerl", "plan", "recipes/scalerl_llama3_8b.yaml", "--gpus", "80"]
    answer = ended(sys.executable, "-m", *words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)
    assert re.search(r"'\w+' is not installed .*; pip install 'megatron_scalerl\[run\]' brings it", answer.stderr)


def test_an_old_python_is_one_line():
    """Old Pythons parse what they meet before the check, and end there."""
    scripts = [["megatron_scalerl/__main__.py"]]
    scripts += [[f"tools/{name}"] for name in TOOLS if name != "house_size.py"]  # for any Python
    ended = run_in_one_process(scripts, "-S", version=(3, 9, 1), PYTHONPATH=str(ROOT))
    for script, (code, _, err, _) in zip(scripts, ended, strict=True):
        message = r".* is Python 3\.9, and 3\.11 is the oldest .*tools/install\.sh cpu.*\n"
        assert code == 2 and re.fullmatch(message, err), (script, err)


def test_the_script_picks_the_environment_that_is_there(tmp_path):
    """examples/forecast_100k.sh: PYTHON, else the project's .venv, else python."""
    script = (ROOT / "examples/forecast_100k.sh").read_text()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/forecast_100k.sh").write_text(script)

    def fake(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"#!/bin/sh\necho {place}\n")
        place.chmod(0o755)
        return str(place)

    def ran(**variables):
        command = ["bash", str(tmp_path / "examples/forecast_100k.sh")]
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            command, env={"PATH": path, **variables}, capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]

    plain = fake(tmp_path / "bin/python")
    assert ran() == plain
    ours = fake(tmp_path / ".venv/bin/python")
    assert ran() == ours
    other = fake(tmp_path / "other")
    assert ran(PYTHON=other) == other


class StandInLauncher:
    """Fails under way, as a peer's broken answer or a bug would."""

    def __init__(self, failure):
        self._failure = failure
        self.engines = SimpleNamespace(members=Membership(1))

    @asynccontextmanager
    async def trainer(self, attempt):
        yield None

    async def start(self, trainer):
        await asyncio.sleep(0)
        raise self._failure


UNDER_WAY = {
    "a number that is none": (lambda: ValueError("could not convert"), 1, r"ValueError: could not convert"),
    "an update": (lambda: RuntimeError("weights differ\nin two lines"), 1, r"weights differ"),
    "a disk": (lambda: OSError(28, "No space left on device"), 1, r"No space left"),
    "several": (lambda: ExceptionGroup("two", [OSError(28, "No space left"), KeyError("x")]), 1, r"No space left"),
    "a bug": (lambda: KeyError("step"), 1, r"KeyError: 'step'"),
    "a recipe": (lambda: RecipeError("prompts.path: expected what the journal names"), 2, r"prompts\.path: expected"),
    "a run in use": (lambda: RunInUse("runs/r: expected no other run"), 76, r"megatron-scalerl: runs/r: expected no"),
}


@pytest.fixture
def launching(monkeypatch):
    """Lets the launcher fail under way."""

    def fails(failure=None):
        @asynccontextmanager
        async def stand_in(*_, **__):
            yield StandInLauncher(failure)

        monkeypatch.setattr("megatron_scalerl.controller.train.launching", stand_in)

    return fails


@pytest.mark.parametrize("name", UNDER_WAY)
def test_what_fails_under_way_is_no_mistake_of_the_users(name, tiny, tmp_path, launching, capsys):
    failure, code, said = UNDER_WAY[name]
    launching(failure())
    assert main(["train", *settings(tiny, tmp_path), "rewards.workers=1"]) == code
    captured = capsys.readouterr().err
    assert re.search(said, captured) and "Traceback" not in captured
    if code == 1:
        log = (tmp_path / "r/logs/controller.log").read_text()
        assert re.search(
            r" INFO +controller megatron_scalerl\.controller\.train: run \w+: attempt local\.0 begins ", log
        )
        assert "Traceback" in log and re.search(said, log) and "StandInLauncher" not in captured
        assert "controller.log" in captured


@pytest.fixture
def attempts(launching, monkeypatch):
    """Attempts of a run, each of which loses a trainer rank; `under_way` is called in each."""
    made = SimpleNamespace(count=0, under_way=lambda: None)

    async def attempt(*_, **__):
        made.count += 1
        made.under_way()
        raise TrainerError("trainer rank 1: the process exited unexpectedly")

    launching()
    monkeypatch.setattr("megatron_scalerl.controller.train._attempt", attempt)
    return made


def test_a_controller_that_a_later_attempt_has_replaced_starts_no_trainer_again(tiny, tmp_path, attempts, capsys):
    """As on a node that Slurm has lost; the attempt that fails is a stand-in."""

    def replace():
        (tmp_path / "r/slurm").mkdir()
        (tmp_path / "r/slurm/attempt").write_text("7.1\n")

    attempts.under_way = replace
    assert main(["train", *settings(tiny, tmp_path), "rewards.workers=1"]) == 1
    assert "this attempt failed, and Slurm has begun a later attempt: trainer rank 1" in capsys.readouterr().err
    assert attempts.count == 1


def test_a_run_whose_trainer_has_lost_a_host_of_its_job_ends_with_77(tiny, tmp_path, attempts, monkeypatch, capsys):
    """At the first failure after it; Slurm and the attempt that fails are stand-ins."""
    left = iter([set(), set(), {"localhost"}, {"localhost"}])
    monkeypatch.setattr("megatron_scalerl.launch.hosts.Hosts.have_left", lambda self: next(left))
    argv = ["train", *settings(tiny, tmp_path), "rewards.workers=1"]
    assert main(argv) == 77 and attempts.count == 2
    assert "localhost: Slurm removed this node, which had trainer ranks" in capsys.readouterr().err
    assert main(argv) == 77 and attempts.count == 2, "not even started"


def test_verbose_sets_the_level_of_every_process(tmp_path, monkeypatch):
    monkeypatch.setenv("MSRL_LOG_LEVEL", "info")
    assert main(["report", str(tmp_path), "--verbose"]) == 2
    assert os.environ["MSRL_LOG_LEVEL"] == "debug"


def test_the_traceback_can_be_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MSRL_TRACEBACK", "1")
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.splitlines()[-1].startswith("megatron-scalerl: ")


def test_the_console_script_is_this_command():
    scripts = configparser.ConfigParser()
    scripts.read(ROOT / "setup.cfg")
    [line] = scripts["options.entry_points"]["console_scripts"].split("\n")[1:]
    name, _, target = line.partition(" = ")
    assert name == PROGRAM and resolve_name(target) is program


EXTRAS = ("torch", "megatron", "transformers", "vllm", "aiohttp", "zmq", "safetensors", "pyarrow", "tokenizers")
WITHOUT_EXTRAS = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from megatron_scalerl.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit", "report"])
def test_an_installation_without_extras_has_the_forecast_and_the_report(name, tmp_path):
    write_run(tmp_path, noise=0.01)
    done = ended(sys.executable, "-c", WITHOUT_EXTRAS, name, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr

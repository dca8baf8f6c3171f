"""Kill the processes of a few runs again and again at random moments, and check what the runs made of it.

    python tools/kill_series.py --out runs/kills [--tries 20] [--kills 24] [--seed 1]
                                [--environment coin:Total] [--victims environment-0,engine-1]

The run of tools/kill_matrix.py with stand-in engines, but longer: SIGKILL of a random process at a random moment up
to four seconds after the run went on from the last kill, --kills times in a run, until each kind of process, or each
of --victims, has had --tries kills. With --environment, in a folder of OUT, completions are episodes of several turns
and the environment's processes are killed, too: coin:Total and coin:Agent are in tests/e2e, and verifiers:guess wants
tools/install.sh environments.
Every run must end with the weights, pass rates and batches of the run without faults, bit for bit; a wrong one counts
against all of its kills. One JSON row per kill is appended to the folder's rows.jsonl, in the form of
kill_matrix.py, whose --table reads them, once its run has ended; a second call continues with the next run.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import harness
from checkout import explained

parser = harness.options(__doc__, out=Path("runs/kills"), tries=20, kills=24, seed=1, environment="", victims="")

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from kill_matrix import ROOT, VICTIMS, Case, Try, faults_of, outcome_of, ready

    from megatron_scalerl.checkpoints.jsonl import read_jsonl

STEPS_PER_KILL = 4
PAUSE_S = 4.0
RECOVERY_S = 900.0


def wait_for_step(tried, step, limit_s):
    """Wait until a step after `step` is recorded; False if the run ends before, or takes longer."""
    begin = time.monotonic()
    while tried.process is not None and tried.process.poll() is None and time.monotonic() - begin < limit_s:
        if tried.steps() > step:
            return True
        time.sleep(0.02)
    return False


def settings_of(environment, tiny):
    """Settings of a run with the environment."""
    if not environment:
        return []
    common = [f"environment.name={environment}", "environment.max_turns=4", "environment.episode_tokens=200"]
    if not environment.startswith("verifiers:"):
        return common
    games = tiny / "games.jsonl"
    with open(games, "w", encoding="utf8") as file:
        command = [sys.executable, "-m", "megatron_scalerl.environments.verifiers", environment.partition(":")[2]]
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples/taskset'}"}
        subprocess.run(command, stdout=file, env=os.environ | paths, check=True)
    rows = [f"prompts.path={games}", "prompts.held_out_path=null", "prompts.held_out=4"]
    # a busy machine takes a minute to import the library
    return [*common, *rows, "environment.workers=1", "environment.timeout_s=300"]


def series(tried, victims, source, number):
    """Run it and kill `victims` one after the other; a row for each that was killed."""
    rows = []
    tried.start()
    wait_for_step(tried, 0, RECOVERY_S)
    for index, victim in enumerate(victims):
        time.sleep(source.uniform(0.0, PAUSE_S))
        if tried.process is None or tried.process.poll() is not None or tried.find(victim) is None:
            continue
        case = Case(victim=victim, fault="KILL", at="series", number=number * 1000 + index)
        begin = time.monotonic()
        step = tried.steps()
        tried.inject(case)
        went_on = wait_for_step(tried, step, RECOVERY_S)
        seconds = round(time.monotonic() - begin, 2)
        rows.append(
            {"case": case.key, "victim": victim, "fault": "KILL", "at": "series", "real": False, "happened": True,
             "at_s": round(begin - tried.begin, 2), "at_step": step, "went_on_s": seconds if went_on else None}
        )  # fmt: skip
        print(f"{case.key}: at step {step}, on after {rows[-1]['went_on_s']} s", flush=True)
    return rows


def main(arguments):
    """Make runs until every kind of process has had its kills."""
    out = arguments.out.resolve() / arguments.environment.replace(":", "_")
    victims = [*VICTIMS]
    if arguments.environment:
        victims.append("environment-0")
    if arguments.environment.startswith("verifiers:"):
        victims.append("environment-server")
    if arguments.victims:
        victims = arguments.victims.split(",")
    tiny, commit = ready(out)
    settings = settings_of(arguments.environment, tiny)
    rows_file = out / "rows.jsonl"
    steps = 4 * (STEPS_PER_KILL * arguments.kills // 4)
    reference = out / f"reference_{steps}"
    if not (reference / "r" / "end.json").exists():
        unharmed = Try(reference, tiny, real=False, steps=steps, settings=settings)
        unharmed.start()
        assert unharmed.process is not None and unharmed.process.wait() == 0, f"see {reference / 'output'}"
    expected = outcome_of(reference / "r")
    assert faults_of(reference / "r", None, steps) == [], faults_of(reference / "r", None, steps)
    bad = False
    while True:
        done = [row for row in read_jsonl(rows_file) if row["at"] == "series"]
        had = Counter(row["victim"] for row in done)
        wanted = [victim for victim in victims for _ in range(arguments.tries - had[victim])]
        if not wanted:
            return int(bad)
        number = max((int(row["case"].rpartition(":")[2]) // 1000 for row in done), default=-1) + 1
        source = random.Random(f"{arguments.seed}/{number}")
        source.shuffle(wanted)
        folder = out / f"series_{number}"
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # of a series that was cut off
        tried = Try(folder, tiny, real=False, steps=steps, settings=settings)
        rows = series(tried, wanted[: arguments.kills], source, number)
        assert tried.process is not None
        code = tried.process.wait()
        wrong = faults_of(tried.run, expected, steps)
        if code:
            wrong.insert(0, f"the exit code is {code}")
        bad |= bool(wrong)
        with open(rows_file, "a", encoding="utf8") as file:
            for row in rows:
                file.write(json.dumps(row | {"code": code, "wrong": wrong, "commit": commit}) + "\n")
        print(f"series {number}: {len(rows)} kills: {'; '.join(wrong) or 'as without the faults'}", flush=True)
        if not rows:
            raise SystemExit(f"{folder}: the run ended before the first kill")
        if not wrong:
            subprocess.run(["rm", "-rf", str(folder)], check=True)


if __name__ == "__main__":
    sys.exit(main(OPTIONS))

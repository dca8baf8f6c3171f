"""Mutation testing of the modules that decide what is trained, what is charged and what is forecast.

    make mutation        # or: python tools/mutation.py [--module gate.py]
    python tools/mutation.py --sample 40 [--seed S]     mutants of any module, against all of CI's tests of its room

Applies one mutation of cosmic-ray at a time to a copy of the tree and runs the fast tests of the module, listed in
tools/mutation.toml. A mutant is killed if a test fails, and survives if all pass: then a test is missing, or the
mutant is equivalent to the source. The sample is fixed by the seed. Requires `pip install --target .venv-mutation
cosmic-ray==8.7.0`, which `make mutation` does. Prints every survivor as a diff, and a table; the exit code is 0 with
survivors too.
"""

import argparse
import ast
import difflib
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "runs" / "mutation.jsonl"
"""One line per mutant."""
sys.dont_write_bytecode = True  # a mutated file may have the size and the second of the one before it
sys.path += [str(ROOT / ".venv-mutation"), str(ROOT / "tests")]
FAST = "not slow and not full and not gpu"
"""Marks of CI's first tests."""
SLOW = "slow and not full and not gpu"
"""Marks of CI's slow tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A change to a module."""

    module: Path
    """Relative to the root."""
    line: int
    """Line of the change, from 1."""
    operator: str
    """Operator of cosmic-ray."""
    source: str
    """The whole module after the change."""


def parser():
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--module", default="", help="only modules whose path ends with this")
    p.add_argument(
        "--sample", type=int, metavar="N", help="N mutants drawn from all modules, in place of mutation.toml's"
    )
    p.add_argument("--seed", type=int, help="of --sample; default: mutation.toml's")
    return p


def behavior(source):
    """The syntax tree without annotations and without the markers between parameters. Raises SyntaxError.

    No code here evaluates an annotation, and mypy checks that callers name the parameters that have to be named.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arguments):
            node.defaults += [default for default in node.kw_defaults if default]
            node.args = node.posonlyargs + node.args + node.kwonlyargs
            node.posonlyargs = []
            node.kwonlyargs = []
            node.kw_defaults = []
    return ast.dump(tree)


def all_mutants(module):
    """Every mutant of a module that compiles and changes its behavior, with its site: place and kind of operator."""
    from cosmic_ray.commands.init import _all_work_items
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / module).read_text(encoding="utf8")
    for item in _all_work_items([ROOT / module], {}):
        [change] = item.mutations
        try:
            changed = mutate_code(source, get_operator(change.operator_name)(), change.occurrence)
            if behavior(changed) == behavior(source):
                continue
        except (AttributeError, SyntaxError):  # cosmic-ray cannot change `except module.Error`
            continue
        name = change.operator_name.removeprefix("core/")
        site = (change.start_pos, name.partition("_")[0])
        yield site, Mutant(module=module, line=change.start_pos[0], operator=name, source=changed)


def sample(module, *, seed, per_site):
    """Up to `per_site` mutants of each site, in the order of the source. The file's folder does not matter."""
    sites = defaultdict(list)
    for site, mutant in all_mutants(module):
        sites[site].append(mutant)
    chance = random.Random(f"{seed}/{module.name}")
    return [m for _, found in sorted(sites.items()) for m in chance.sample(found, min(per_site, len(found)))]


def copy_tree(target):
    """The tracked and the new files of the checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    for name in names:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def _pytest(tests, marks, seconds, log):
    """In a process of its own group: run the tests, everything printed goes to `log`, the exit code is pytest's."""
    import pytest

    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    options = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider", "--tb=line", "-o", "log_cli=false"]
    code = int(pytest.main([*options, *tests]))
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        code = 0
    os._exit(code)


def outcome(tests, *, seconds, log, marks=FAST):
    """Run the tests in a fork of this process, which has imported torch already: survived, killed or timeout.

    seconds: of processor time, so that other work on the machine kills no mutant; of wall time ten times as many.
    """
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(tests, marks, seconds, log))
    child.start()
    child.join(10 * seconds)
    if child.is_alive():
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        return "timeout"
    if child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    if child.exitcode:
        return "killed"
    return "survived"


def killer(log):
    """The first failed test that pytest printed."""
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0] if lines else ""


def difference(mutant):
    """The change as a diff without context."""
    before = (ROOT / mutant.module).read_text(encoding="utf8").splitlines()
    lines = difflib.unified_diff(before, mutant.source.splitlines(), lineterm="", n=0)
    return "\n".join(x for x in lines if not x.startswith(("---", "+++", "@@")))


def run_part(part, config, options):
    """One record per sampled mutant of the part's modules. Raises RuntimeError if the tests fail without a change."""
    log = Path("pytest.log").resolve()
    modules = [p.relative_to(ROOT) for pattern in part["modules"] for p in sorted(ROOT.glob(pattern))]
    modules = [m for m in modules if str(m).endswith(options.module)]
    if not modules:
        return []
    if outcome(part["tests"], seconds=config["cpu_seconds"], log=log) != "survived":
        raise RuntimeError(f"{', '.join(part['tests'])} do not pass without a change:\n{log.read_text()}")
    records = []
    for module in modules:
        for mutant in sample(module, seed=config["seed"], per_site=config["mutants_per_site"]):
            records.append(judged(mutant, part["tests"], config["cpu_seconds"], log, (FAST,)))
    return records


def judged(mutant, tests, seconds, log, tiers):
    """The record of one mutant: whether a test of these tiers notices it. Restores the module."""
    began = time.monotonic()
    change = difference(mutant)
    mutant.module.write_text(mutant.source, encoding="utf8")
    result = "survived"
    for marks in tiers:
        if result == "survived":
            result = outcome(tests, seconds=seconds, log=log, marks=marks)
    shutil.copyfile(ROOT / mutant.module, mutant.module)
    record = {
        "module": str(mutant.module), "line": mutant.line, "operator": mutant.operator,
        "outcome": result, "killer": killer(log) if result == "killed" else "",
        "seconds": round(time.monotonic() - began, 2), "diff": change,
    }  # fmt: skip
    with RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    if result == "survived":
        print(f"{mutant.module}:{mutant.line} {mutant.operator} survived\n{change}", flush=True)
    return record


def run_sample(count, seed, config, options):
    """One record per mutant, drawn from all modules by their size, judged by CI's tests of its room that reach it."""
    from changed import Closures

    log = Path("pytest.log").resolve()
    closures = Closures()
    tests = sorted(path for path in closures.sources if path.startswith("tests/") and "/test_" in path)
    modules = sorted(path for path in closures.sources if path.startswith("megatron_scalerl/") and "/" in path[17:])
    modules = [module for module in modules if module.endswith(options.module)]
    chance = random.Random(seed)
    records = []
    while len(records) < count:
        [module] = chance.choices(modules, [(ROOT / path).stat().st_size for path in modules])
        mutants = sample(Path(module), seed=seed, per_site=1)
        room = module.split("/")[1]
        reaching = [test for test in tests if test.startswith(f"tests/{room}/") and module in closures.of(test)]
        if mutants and reaching:
            records.append(judged(chance.choice(mutants), reaching, 10 * config["cpu_seconds"], log, (FAST, SLOW)))
            print(len(records), records[-1]["module"], records[-1]["outcome"], records[-1]["killer"], flush=True)
    return records


def main(options):
    """Run all parts in a copy of the tree and print the table."""
    began = time.monotonic()
    config = tomllib.loads((ROOT / "tools" / "mutation.toml").read_text(encoding="utf8"))
    for name in ["pytest", *config["preload"]]:  # once, before the forks
        importlib.import_module(name)
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    RECORDS.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        os.chdir(folder)
        # CI: hypothesis draws the same examples for every mutant, and remembers none
        os.environ |= {"CI": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": folder}
        sys.path.insert(0, folder)
        seed = options.seed if options.seed is not None else config["seed"]
        if options.sample:
            records = run_sample(options.sample, seed, config, options)
        else:
            records = [record for part in config["part"] for record in run_part(part, config, options)]
        os.chdir(ROOT)
    counts = defaultdict(Counter)
    for record in records:
        counts[record["module"]][record["outcome"]] += 1
        counts["total"][record["outcome"]] += 1
    print(f"{'module':48} mutants  killed timeout survived")
    for module in [*(m for m in counts if m != "total"), "total"]:
        found = counts[module]
        print(f"{module:48} {sum(found.values()):7} {found['killed']:7} {found['timeout']:7} {found['survived']:8}")
    print(f"seed {seed}, {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main(parser().parse_args())

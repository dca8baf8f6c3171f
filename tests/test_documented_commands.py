"""Every YAML, every program and every command of README and docs works as it stands there, paths apart."""

import argparse
import importlib.util
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml
from journals import write_journal
from page.report_runs import write_run
from programs import ROOT, printed
from rollout_groups import group, rollout

from megatron_scalerl.__main__ import _parse
from megatron_scalerl.cluster.site import read_site
from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.rollouts.history import BatchRecord
from megatron_scalerl.tiny.build import TinyArguments, build

COURSE = ROOT / "docs/course"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(COURSE.glob("*.md"))]
PAGES += sorted(COURSE.glob("*.ipynb"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
WORDS = r"python|bash|source|srun|docker|apptainer|megatron-scalerl|examples/\S+\.sh|tests/run\.sh|tools/\S+\.sh"
COMMAND = re.compile(rf"(?:\w+=\S+ )*(?:{WORDS})(?: |$)")


def included(match):
    """The file that a line of pymdownx.snippets names."""
    return (ROOT / match[1]).read_text()


def text_of(page):
    """A page's Markdown; of a notebook its cells of text: test_notebooks.py runs the others."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return text


def blocks(page):
    """[(language, text)] of a page's code blocks, fenced or indented."""
    text = re.sub(r'^--8<-- "(\S+)"\n', included, text_of(page), flags=re.MULTILINE)
    rest = FENCED.sub("", text)
    return [*FENCED.findall(text), *(("", block) for block in INDENTED.findall(rest))]


def commands_of(text):
    """The commands of a block, or None for a block that is something else."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("$ ") for line in lines):
        return [line[2:] for line in lines if line.startswith("$ ")]
    return lines if all(COMMAND.match(line) for line in lines) else None


def commands():
    """(page, command) for all of them: blocks of commands, and inline code that begins like one."""
    for page in PAGES:
        text = text_of(page)
        found = [c for language, block in blocks(page) if language in ("", "bash") for c in commands_of(block) or ()]
        found += [code for code in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)) if COMMAND.match(code)]
        yield from ((page.name, command) for command in dict.fromkeys(found))


COMMANDS = list(commands())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the documented commands run as they stand: its paths are theirs."""
    root = tmp_path_factory.mktemp("documented")
    for name in ("tools", "examples", "recipes", "megatron_scalerl", "tests"):
        (root / name).symlink_to(ROOT / name)
    build(root / "tiny", TinyArguments(seed=1, train_prompts=40, held_out=10, sft_examples=4))
    policy = root / "models/my_policy"
    policy.parent.mkdir()
    (root / "tiny/base_policy").rename(policy)
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    (root / "data").mkdir()
    (root / "data/math.jsonl").write_bytes((root / "tiny/prompts.jsonl").read_bytes())
    for name in ("my_run", "a", "b", "c"):
        written(root / "runs" / name, policy)
    [(_, text)] = [block for block in blocks(ROOT / "README.md") if block[0] == "yaml"]
    (root / "my_run.yaml").write_text(text)
    hours, values = np.linspace(10, 200, 12), np.linspace(0.42, 0.6, 12)
    rows = "".join(f"{name},{h},{v}\n" for name in "ab" for h, v in zip(hours, values))
    (root / "curves.csv").write_text("recipe,gpu_hours,pass_rate\n" + rows)
    return root


def written(folder, policy):
    """A run's folder as the run itself writes it."""
    folder.mkdir(parents=True)
    write_run(folder, noise=0.01)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"policy": {"path": str(policy)}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    record = BatchRecord(batch=0, step=1, policy_version=0, group_ids=(0,))
    write_journal(folder, groups=[(group([1.0, -1.0]), [rollout(tokens=(10, 11, 12))] * 2)], batches=[record])


def ran(command, place):
    """Standard output of a documented command, run as it stands in `place`."""
    argv = [sys.executable if word == "python" else word for word in shlex.split(command, comments=True)]
    if argv[0] == "megatron-scalerl":
        argv[:1] = [sys.executable, "-m", "megatron_scalerl"]
    return printed(*argv, cwd=place, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")


def merged(base, more):
    both = {key: merged(base[key], more[key]) for key in base.keys() & more.keys() if isinstance(more[key], dict)}
    return {**base, **more, **both}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_yaml_is_a_recipe_or_a_part_of_one(page, place):
    whole = yaml.safe_load((place / "my_run.yaml").read_text())
    for language, text in blocks(page):
        if language == "yaml" and text.startswith("# site.yaml\n"):
            (place / "site.yaml").write_text(text)
            assert read_site(place / "site.yaml").sbatch["account"]
        elif language == "yaml":
            assert Recipe.model_validate(merged(whole, yaml.safe_load(text)))


def test_the_readmes_recipe_starts(place, monkeypatch):
    """All that is known before a process is started: lengths, capacity, layout, prompts."""
    monkeypatch.chdir(place)
    recipe = load_recipe("my_run.yaml", ["prompts.held_out=8"])  # 1,000 in a real file
    resolved = check_inputs(recipe).resolved(recipe)
    assert resolved.trainer.micro_batch_tokens == 2048 + 12288 + 2048  # no tag of thinking, and so no forced phrase
    assert 2048 + 12288 + 2048 <= resolved.engine.vllm["max_model_len"] <= 16512


def arguments(words):
    """The words of a usage line as somebody would fill them in: brackets off, the first of several choices."""
    filled = {"RECIPE": "recipes/scalerl_llama3_8b.yaml", "N": "8"}
    bare = [word if "=[" in word else word.strip("[]").split("|")[0] for word in words]
    return [filled.get(word, word) for word in bare]


def check_product(words, place):
    """A command of `megatron-scalerl` can be parsed, and its recipe loads."""
    try:
        _, found = _parse(arguments(words))
    except SystemExit as end:
        assert end.code == 0 and "--help" in words
        return
    if getattr(found, "recipe", None):
        folder = ROOT if (ROOT / found.recipe).is_file() else place
        load_recipe(folder / found.recipe, found.overrides)


@cache
def parser_of(tool):
    spec = importlib.util.spec_from_file_location(tool.stem, ROOT / tool)
    module = sys.modules[tool.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "parser", argparse.ArgumentParser)()


def check_command(argv, place):
    """Raises, or fails, where a documented command could not be given as it stands."""
    if argv[:2] == ["bash", "-c"]:
        check_command(shlex.split(argv[2]), place)
    elif argv[0].endswith(".sh") or argv[0] == "bash":
        script, *words = argv[argv[0] == "bash" :]
        text = (ROOT / script).read_text()
        options = [word for word in words if word[:2] == "--"]
        assert all(re.search(rf"^\s*(--\w+ \| )*{re.escape(word)}( \| --\w+)*\)", text, re.M) for word in options)
    elif argv[0] == "srun":
        check_command(argv[next(i for i, word in enumerate(argv[1:], 1) if word[:2] != "--") :], place)
    elif argv[0] in ("source", "docker", "apptainer") or argv == ["python", "-m", "megatron_scalerl"]:
        pass  # another program, or the name of this one alone
    elif words := product_words(shlex.join(argv)):
        check_product(words, place)
    elif argv[0] == "python" and Path(argv[1]).parent.name == "examples":
        recipe, *overrides = [word for word in argv[2:] if ".yaml" in word or "=" in word] or [""]
        if recipe:
            load_recipe(ROOT / recipe, [word.replace("=recipes", f"={ROOT}/recipes") for word in overrides])
    elif argv[0] == "python" and argv[1] != "-m":
        parser_of(Path(argv[1])).parse_args(arguments(argv[2:]))


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_every_command_can_be_given(page, place):
    failed = {}
    for command in [command for name, command in COMMANDS if name == page]:
        argv = shlex.split(command, comments=True)
        try:
            check_command([word for word in argv if not re.match(r"[A-Z_]+=", word)], place)
        except (Exception, SystemExit) as error:
            failed[command] = repr(error)
    assert failed == {}


SAID = "verdict: "
PAPER = "--r0 0.40 --prompts 1000 --generations 16"
RUN = {
    "report runs/my_run": "95 % interval",
    "fit runs/my_run --predict 50000,100000": SAID,
    "report runs/my_run --html page.html": "page: page.html, with 1 groups",
    "show runs/my_run": "pass rate 1/2",
    "fit runs/my_run --predict 16000,50000,100000 --html report.html --plot forecast.png": SAID,
    "fit runs/my_run --fit-until 8000": SAID,
    "fit runs/a runs/b runs/c --compare": "A differs between runs of one recipe by",
    "fit examples/wandb_chart.csv": "read chain - lr 5e-5: W&B chart, 30 points of eval/accuracy over",
    "fit examples/verl_console.log --fit-until 60 --predict 200 --prompts 200 --generations 2 --html report.html": (
        "mean absolute error 0.0194; 12 of 13 measurements inside their interval"
    ),
    f"fit examples/curves/points.csv --series figure=fig3c_fp32 --series 'series=*' {PAPER} --compare": (
        "default-baseline is the reference: A = 0.538, B = 2.10 (1 run)."
    ),
    "fit curves.csv --series recipe=a --compute gpu_hours --score pass_rate --r0 0.40 --json -": '"asymptote"',
}
"""Quick commands of `megatron-scalerl`, and what each prints."""


def product_words(command):
    """The words after `megatron-scalerl`, however the command is given; none for another program."""
    words = shlex.split(command, comments=True)
    if words[0] == "megatron-scalerl":
        return words[1:]
    if words[:3] == ["python", "-m", "megatron_scalerl"]:
        return words[3:]
    return []


def documented(words):
    """A documented command of `megatron-scalerl` with these words, as it is written."""
    return next(command for _, command in COMMANDS if product_words(command) == shlex.split(words))


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_quick_commands_do_what_they_say(command, place):
    assert RUN[command] in ran(documented(command), place)
    written_files = [word for word in command.split() if word.endswith((".html", ".png"))]
    assert all((place / name).stat().st_size for name in written_files)


@pytest.mark.slow
def test_a_policy_is_converted_there_and_back(place):
    """docs/checkpoints.md, in the order of the page."""
    page = [c for name, c in COMMANDS if name == "checkpoints.md" and "models/my_policy" in c and "runs/" not in c]
    there, back, same = list(dict.fromkeys(page))[:3]
    assert "compared bit for bit" in ran(there, place) and "compared bit for bit" in ran(back, place)
    assert "equal bit for bit" in ran(same, place)


def test_the_programs_of_the_pages_run(place, monkeypatch):
    monkeypatch.chdir(place)
    programs = [text for page in PAGES for language, text in blocks(page) if language == "python"]
    hours = np.linspace(20.0, 400.0, 20)
    given = {"gpu_hours": hours, "pass_rates": 0.4 + 0.3 / (1 + (80 / hours) ** 1.8)}
    for text in programs:
        exec(compile(text, "a documented program", "exec"), dict(given))
    assert programs

"""The rules that keep the code readable and portable, held by the code itself."""

import ast
import re
from collections import Counter

from changed import nodes, tree
from house_size import measure
from programs import ROOT

PACKAGE = ROOT / "megatron_scalerl"
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
IN_PACKAGE = sorted(PACKAGE.rglob("*.py"))
FILES = sorted([*IN_PACKAGE, *(ROOT / "tools").glob("*.py"), *(ROOT / "examples").glob("*.py")])
SEAM = {
    "distributed/device.py",
    "distributed/cpu_compat.py",
    "logits/cuda_backend.py",
    "logits/choice.py",  # a backend's name
    "cluster/probe.py",  # asks which CUDA torch was built for
}
VLLM = {
    "engine/vllm_plugin.py",
    "engine/forced_on_device.py",
    "engine/vllm_progress.py",
    "engine/server.py",
    "weights/live_weights.py",
    "weights/adapter_slot.py",
    "weights/weight_receiver.py",
}

OWN_STATE = {
    "environments/episode_record.py",
    "controller/saver.py",
    "weights/weight_receiver.py",
    "plan/work.py",
    "plan/simulate.py",
    "rewards/pool.py",
    "rollouts/agents.py",
    "rollouts/trace.py",
    "processes/worker_pool.py",
    "trainer/layers/packing.py",
    "trainer/step_metrics.py",
    "weights/change_record.py",
}
"""Files with dataclasses that stay in their module: state that changes, or pairs of values."""

WALL_CLOCK = {
    "controller/metrics.py": "records it",
    "controller/run_folder.py": "records it",
    "controller/train.py": "records it",
    "page/runs_index.py": "how long ago a run wrote",
    "cluster/slurm_status.py": "which attempts belong to the last submission, and until when a job may run",
    "cluster/submission.py": "records it",
}
"""Files that read the time of day or a file's time, which may jump, and what for."""


def name(path):
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def having(condition, files=FILES):
    """(file, node) for each node that meets the condition."""
    return [(name(path), node) for path in files for node in nodes(path) if condition(node)]


def package_files(condition):
    """Files of the package with a node that meets the condition."""
    return {file for file, _ in having(condition, IN_PACKAGE)}


def lines(condition):
    """file:line of each node that meets the condition."""
    return [f"{file}:{node.lineno}" for file, node in having(condition)]


def modules(node):
    """Modules that an import names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def is_function(node):
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def test_files_and_functions_stay_small():
    long_files = [name(p) for p in FILES if p.read_text().count("\n") > 600]
    long_functions = lines(lambda node: is_function(node) and node.end_lineno - node.lineno > 60)
    assert (long_files, long_functions) == ([], [])


def test_only_the_seam_says_cuda():
    def says_cuda(node):
        named = isinstance(node, ast.Constant) and re.fullmatch(r"cuda(:\d+)?", str(node.value))
        return named or getattr(node, "attr", "") == "cuda"

    assert package_files(says_cuda) <= SEAM


def test_only_what_runs_inside_vllm_imports_it():
    assert package_files(lambda node: any(re.match(r"vllm\b", module) for module in modules(node))) <= VLLM


def test_only_parallel_reads_megatrons_globals():
    reading = package_files(lambda node: "parallel_state" in (getattr(node, "attr", ""), getattr(node, "id", "")))
    assert reading <= {"distributed/parallel.py"}


def test_no_collective_of_objects():
    """torch unpickles what a peer sends in one: a peer could run code."""
    collective = r"\w*(gather|broadcast|scatter|send|recv)_object(_list)?"
    assert lines(lambda node: re.fullmatch(collective, getattr(node, "attr", ""))) == []


def test_nothing_catches_everything_silently():
    def catches_silently(node):
        if not isinstance(node, ast.ExceptHandler):
            return False
        everything = node.type is None or getattr(node.type, "id", "") == "Exception"
        return everything and not any(isinstance(n, ast.Raise) for n in ast.walk(node))

    allowed = {"rewards/worker.py", "rewards/sandbox_tests.py"}  # whatever code of others raises is passed on
    assert {file for file, _ in having(catches_silently)} <= allowed


def test_public_names_say_what_they_are():
    silent = [
        f"{name(path)}:{node.name}"
        for path in IN_PACKAGE
        for node in tree(path).body
        if (is_function(node) or isinstance(node, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_no_folder_brings_its_own_code():
    """transformers runs a model folder's Python files where it is allowed to, and asks on a terminal by default."""

    def refuses_code(call):
        return any(k.arg == "trust_remote_code" and getattr(k.value, "value", None) is False for k in call.keywords)

    calls = having(lambda node: isinstance(node, ast.Call) and called(node) == "from_pretrained")
    assert calls and [(file, node.lineno) for file, node in calls if not refuses_code(node)] == []


def test_a_format_string_is_one_token_under_any_python():
    """Since Python 3.12 it is several: the sizes, and so the ceilings, would differ between two interpreters."""
    assert measure('x = f"{a + 1:{b}} {c!r}" + f"{f\'{d}\'}"\n')["tokens"] == 5


def test_words_without_a_noun_are_counted():
    counts = measure('"""Those of it, in a file."""\nfound = other.value  # what remains\n')
    assert (counts["words for a noun"], counts["words"], counts["identifiers without a noun"]) == (3, 8, 1)


def test_nothing_that_others_write_is_unpickled():
    """A pickle is a program. Checkpoints go through `safe_*`; the rewards' processes have their own pipe."""
    forbidden = {"pickle": {"load", "loads", "Unpickler"}, "torch": {"load"}, "dist_checkpointing": {"load"}}

    def unpickles(node):
        if isinstance(node, ast.Attribute):
            return {node.attr} & forbidden.get(getattr(node.value, "id", ""), set())
        if isinstance(node, ast.ImportFrom):
            return {a.name for a in node.names} & forbidden.get((node.module or "").split(".")[-1], set())
        return set()

    allowed = {f"checkpoints/safe_{n}.py" for n in ("index", "values", "megatron")}
    assert package_files(unpickles) <= {"rewards/worker.py"} | allowed


def test_dataclasses_that_are_passed_on_are_frozen_and_keyword_only():
    """So that no receiver changes what a sender still reads, and no field is given in another's place."""

    def is_loose(node):
        decorators = [d for d in getattr(node, "decorator_list", ()) if "dataclass" in ast.unparse(d)]
        given = [{ast.unparse(k) for k in getattr(d, "keywords", ())} for d in decorators]
        return isinstance(node, ast.ClassDef) and not all(each >= {"frozen=True", "kw_only=True"} for each in given)

    assert package_files(is_loose) <= OWN_STATE


def test_nothing_is_decided_by_the_time_of_day():
    """It may jump at any moment. Limits and durations are measured with time.monotonic or the event loop's clock."""
    wall = r"time\.(time(_ns)?|localtime|gmtime|strftime|ctime)|.*date.*\.(now|utcnow|today)|.*mtime(_ns)?"

    def reads_it(node):
        read = isinstance(node, ast.Attribute) and re.fullmatch(wall, ast.unparse(node))
        return read or (isinstance(node, ast.ImportFrom) and node.module == "time")

    assert package_files(reads_it) == set(WALL_CLOCK)


def test_text_from_elsewhere_is_not_read_as_markup():
    """rich takes a `[/x]` in a path or in a damaged file for markup, and raises."""
    consoles = having(lambda node: getattr(getattr(node, "func", None), "id", "") == "Console", IN_PACKAGE)
    assert consoles
    assert all("markup=False" in [ast.unparse(k) for k in node.keywords] for _, node in consoles)


def test_no_junk_drawers():
    assert [name(p) for p in FILES if p.stem in {"utils", "common", "helpers", "misc"}] == []


OF_ONE_FILE = {
    "launch/test_admission.py: StandInAgent",
    "engine/test_bodies.py: StandInDecoder",
    "test_command_line.py: StandInLauncher",
    "launch/test_launcher.py: StandInProcess",
    "controller/test_overlap.py: StandInSender",
    "rewards/test_lost_workers.py: StandInSpawn",
    "controller/test_overlap.py: StandInStream",
}
"""Stand-ins beside tests/fakes: of an interface that one file alone replaces."""


def test_an_interface_has_one_stand_in():
    classes = having(lambda node: isinstance(node, ast.ClassDef) and node.name.startswith("StandIn"), TEST_FILES)
    found = {f"{file.removeprefix('tests/')}: {node.name}" for file, node in classes}
    assert {each for each in found if not each.startswith("fakes/")} == OF_ONE_FILE
    assert [name for name, count in Counter(each.split(": ")[1] for each in found).items() if count > 1] == []


def test_no_test_file_imports_another_one():
    """Helpers are modules of their own, fixtures are in conftest.py."""
    stems = {path.stem for path in TEST_FILES if path.stem.startswith("test_")}

    def imports_tests(node):
        names = [*modules(node), *(alias.name for alias in getattr(node, "names", ()) if modules(node))]
        return stems & {name.split(".")[-1] for name in names}

    assert having(imports_tests, TEST_FILES) == []


def test_the_modules_of_the_tests_have_names_of_their_own():
    """They are imported by name: two of one name cannot be collected together, and a few files never are."""
    names = Counter(path.name for path in TEST_FILES if path.name not in ("__init__.py", "conftest.py"))
    assert [name for name, count in names.items() if count > 1] == []


CLOCK = r"\b(time\.(time|monotonic|perf_counter)(_ns)?|loop\.time)\(\)"
DIFFERENCE = re.compile(rf"{CLOCK} - | - {CLOCK}")
NOT_ITS_OWN = {
    r"(psutil\.)?(process_iter|pids)\(": "all processes of the machine (tests/own_processes.py)",
    r"(os\.(listdir|scandir|walk)|glob\.i?glob)\('/proc\b(?!/self)": "all processes of the machine",
    r"(pathlib\.)?Path\('/proc'[^)]*\)\.(r?glob|iterdir)\(": "all processes of the machine",
    r"[\w.]+\(\[?f?'(pgrep|pkill|killall)\b": "processes by their name",
    r"(os\.(listdir|scandir|walk)|glob\.i?glob)\('/dev/shm\b": "the shared memory of others",
    r"(pathlib\.)?Path\('/dev/shm'[^)]*\)\.(r?glob|iterdir)\(": "the shared memory of others",
    r"[\w.]*\b(bind|create_server)\(\(.*, [1-9]\d*\)": "a fixed port",
    r"[\w.]*\b(bind\(.*:|(TCPSite|start_server)\(.*[ =])[1-9]\d+\b": "a fixed port",
}
"""Calls of tests, by their beginning -> what they look at or take."""
NAMES = re.compile(
    r"process_iter|pids|listdir|scandir|walk|[ir]?glob|iterdir|bind|create_server|TCPSite|start_server"
    r"|run|Popen|call|system|check_\w+"
)


def nodes_but(node, *kinds):
    """A node and all below it but for nodes of these kinds and what is below them."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, kinds):
            yield from nodes_but(child, *kinds)


def called(node):
    """The last part of the name of what is called, empty for other nodes."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", "") or getattr(function, "id", "")


def smaller_sides(node):
    """The sides of comparisons that are asserted to be less than the others, as text."""
    for compare in [each for each in ast.walk(node) if isinstance(each, ast.Compare)]:
        sides = [compare.left, *compare.comparators]
        for left, right, op in zip(sides, sides[1:], compare.ops):
            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                yield ast.unparse(left if isinstance(op, ast.Lt | ast.LtE) else right)


def races(tree):
    """(line, what) of what fails in a test once in a while: on a busy machine, or beside another run of the tests."""
    for function in filter(is_function, ast.walk(tree)):
        test = function.name.startswith("test_")  # in it, functions too; others are looked at one by one
        inner = () if test else (ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = list(nodes_but(function, ast.While, *inner))  # a loop waits for something
        last = max((node.lineno for node in nodes if isinstance(node, ast.Assert)), default=0)
        for node in nodes:
            if called(node) == "sleep" and (test or node.lineno < last):
                yield node.lineno, "a sleep in place of a wait for a condition (tests/waiting.py)"
        assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign) and isinstance(n.value, ast.BinOp)]
        differences = {ast.unparse(n.targets[0]) for n in assigned if DIFFERENCE.search(ast.unparse(n.value))}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and any(
                side in differences | {"elapsed", "seconds", "took"} or DIFFERENCE.search(side)
                for side in smaller_sides(node.test)
            ):
                yield node.lineno, "an upper limit of the time that something takes"
    for node in ast.walk(tree):
        if NAMES.fullmatch(called(node)):
            text = ast.unparse(node)
            yield from ((node.lineno, what) for call, what in NOT_ITS_OWN.items() if re.match(call, text))


def test_no_test_races_with_a_busy_machine_or_another_test():
    found = {f"{name(path)}:{line}: {what}" for path in TEST_FILES for line, what in races(tree(path))}
    assert sorted(found) == []


def test_a_race_is_found():
    bad = (
        "time.sleep(0.1)",
        "with pool: await asyncio.sleep(0)",
        "async def work(): await asyncio.sleep(60)",
        "assert time.monotonic() - began < 60",
        "took = loop.time() - began; assert 5 > took, 'late'",
        "[p for p in psutil.process_iter() if p]",
        "os.listdir('/proc')",
        "Path('/proc').glob('[0-9]*')",
        "glob.glob('/dev/shm/*')",
        "subprocess.run(['pkill', '-f', 'engine'])",
        "server.bind(('127.0.0.1', 8080))",
        "socket.bind('tcp://127.0.0.1:5555')",
        "web.TCPSite(runner, port=8000)",
    )
    good = (
        "while not done(): time.sleep(0.1)",
        "server.bind(('', 0))",
        "os.listdir('/proc/self/fd')",
        "assert 0 < took",
    )
    test = "async def test_it():\n    {}\n    assert done\n"
    assert [line for line in bad if [at for at, _ in races(ast.parse(test.format(line)))] != [2]] == []
    assert not [found for each in good for found in races(ast.parse(test.format(each)))]

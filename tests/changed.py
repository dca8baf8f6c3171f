"""Test files that a change concerns, for `tests/run.sh --changed` and `--all`.

    python tests/changed.py COMMIT [PATH ...]    test files, below PATHs if given, whose closure changed since COMMIT
    python tests/changed.py --files COMMIT       test files that changed themselves

The closure of a test holds what it imports, at any depth; modules that are named in a string, as commands and the
programs of processes are; the conftest.py whose fixtures it asks for; and other files (templates, recipes, data)
whose name stands in a string. Files of the working tree count as they are.
"""

import ast
import functools
import re
import sys
from pathlib import Path

from programs import printed

ROOT = Path(__file__).resolve().parent.parent
CODE = ("megatron_scalerl", "tools", "tests", "examples", "docs")
ON_PATH = ("", "tests/", "tools/", "tools/forecast/", "tests/gpu/")
"""Folders below which an absolute import may start: those of `pythonpath` in setup.cfg, and a test's own."""
COMMANDS = "megatron_scalerl/__main__.py"
"""Names the modules of commands from the package on."""
EVERYTHING = {"setup.cfg", "pyproject.toml", "tests/run.sh", "tests/conftest.py", "tests/sampling.py"}
"""A change of one of these concerns every test."""


def files(*arguments):
    """Paths from the root that a git command lists."""
    return set(printed("git", *arguments).split("\n")) - {""}


def changed(commit):
    """Paths that differ between a commit and the working tree, new files among them."""
    return files("diff", "--name-only", "--no-renames", commit) | files("ls-files", "--others", "--exclude-standard")


@functools.cache
def tree(path):
    return ast.parse((ROOT / path).read_text())


@functools.cache
def nodes(path):
    """All nodes of a file."""
    return list(ast.walk(tree(path)))


class Closures:
    """What each Python file depends on, directly and at any depth."""

    def __init__(self):
        listed = files("ls-files", "--cached", "--others", "--exclude-standard")
        present = {path for path in listed if (ROOT / path).exists()}
        self.sources = {path for path in present if path.endswith(".py") and path.startswith(CODE)}
        self.known = {}
        self.by_name = {}
        for path in present - self.sources:
            self.by_name.setdefault(Path(path).name, set()).add(path)

    def module(self, dotted, beside=""):
        """The file of a module's name, if it is one of this repository."""
        name = dotted.replace(".", "/")
        folders = (*ON_PATH, f"{beside}/")
        paths = (f"{folder}{name}{end}" for folder in folders for end in (".py", "/__init__.py"))
        return next((path for path in paths if path in self.sources), None)

    def _names(self, path):
        """Modules that a file imports or names in a string, and names of files in its strings."""
        for node in nodes(path):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield str(node.module)
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                yield from re.findall(r"megatron_scalerl(?:\.\w+)+", node.value)  # an entry point
                yield from re.findall(r"^([\w.]+):\w+$", node.value)  # module:function
                yield from re.findall(r"[\w-]+\.[\w.]+$", node.value)  # a file
                if node.value in ("megatron_scalerl", "megatron-scalerl") and path != COMMANDS:
                    yield "megatron_scalerl.__main__"
                if path == COMMANDS:
                    yield f"megatron_scalerl.{node.value}"

    def direct(self, path):
        """Files on which a Python file depends directly."""
        if path not in self.known:
            beside = str(Path(path).parent)
            names = set(self._names(path))
            modules = {self.module(name, beside) for name in names} - {None, path}
            others = {other for name in names for other in self.by_name.get(name, ())}
            self.known[path] = {str(module) for module in modules} | others | self._fixtures(path)
        return self.known[path]

    def _fixtures(self, path):
        """conftest.py files with a fixture whose name stands in a test file."""
        if not Path(path).name.startswith("test_"):
            return set()
        source = (ROOT / path).read_text()
        above = {f"{folder}/conftest.py" for folder in Path(path).parents} & self.sources
        return {
            conftest for conftest in above if any(re.search(rf"\b{name}\b", source) for name in fixtures(conftest))
        }

    def of(self, path):
        """The file and all that it depends on."""
        closure = {path}
        waiting = [path]
        while waiting:
            new = {other for other in self.direct(waiting.pop()) if other not in closure}
            closure |= new
            waiting += [other for other in new if other in self.sources]
        return closure


@functools.cache
def fixtures(path):
    """Names of the fixtures of a conftest.py that a test asks for by name."""
    functions = [node for node in tree(path).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    decorators = {node.name: [ast.unparse(d) for d in node.decorator_list] for node in functions}
    return frozenset(
        name
        for name, lines in decorators.items()
        if any("fixture" in line and "autouse" not in line for line in lines)
    )


def concerned(commit, below):
    """Test files below the paths whose closure changed since the commit."""
    different = changed(commit)
    closures = Closures()
    tests = sorted(path for path in closures.sources if re.match(r"tests/(.*/)?test_\w+\.py$", path))
    chosen = [
        test for test in tests if not below or any(test == path or test.startswith(f"{path}/") for path in below)
    ]
    if different & EVERYTHING:
        return chosen
    return [test for test in chosen if closures.of(test) & different]


def main(arguments):
    if arguments[0] == "--files":
        mine = {path for path in changed(arguments[1]) if re.match(r"tests/(.*/)?test_\w+\.py$", path)}
        lines = sorted(path for path in mine if (ROOT / path).exists())
    else:
        lines = concerned(arguments[0], [path.rstrip("/") for path in arguments[1:]])
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])

"""What may import what: packages stand on floors, nothing imports upward, and no two files import each other."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from changed import nodes

PACKAGE = Path(__file__).parent.parent / "megatron_scalerl"
FLOORS = [
    "record",
    "types processes models distributed",
    "__main__ recipe checkpoints losses logits",
    "weights fit rewards prompts algorithms batching tiny",
    "trainer engine environments",
    "rollouts launch",
    "plan evaluation",
    "controller page",
    "commands cluster",
]
"""Packages and modules of the top level, from the ground up."""
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(path):
    """Modules of the package that a file imports, at its top, in a function or for types only."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: expected absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE.name:
                # the type checker lets a missing module pass: packages without types look the same to it
                assert name in MODULES, f"{path}:{node.lineno}: no module {name}"
                yield name


IMPORTS = {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def room(module):
    return (module.split(".") + [""])[1]


def test_no_package_imports_from_its_own_floor_or_above():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
    assert {room(module) for module in MODULES} - {""} == floor.keys()
    upward = {
        (module, other)
        for module, others in IMPORTS.items()
        for other in others
        if room(module) and room(other) and room(module) != room(other) and floor[room(other)] >= floor[room(module)]
    }
    assert upward == set()


def test_no_files_import_each_other():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None

"""Which package may import which. Read from the bottom of the table: nothing imports upward, so there is no cycle."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "megatron_scalerl"
FLOORS = [
    {"shapes": ""},
    {  # no process, no wire
        "types": "",
        "environment": "",
        "processes": "",
        "losses": "shapes",
        "logits": "shapes",
        "models": "",
        "tracing": "",
    },
    {
        "recipe": "models",
        "checkpoints": "models",
        "batching": "losses shapes types",
    },
    {
        "distributed": "recipe",
        "prompts": "recipe types",
        "rewards": "processes recipe types",
        "tiny": "recipe",
        "safe_load": "checkpoints",
        "fit": "recipe",
    },
    {
        "weights": "checkpoints distributed models",
        "convert": "checkpoints models processes safe_load",
        "update_report": "fit",
    },
    {
        "trainer": "batching checkpoints distributed logits losses models processes recipe safe_load tracing types "
        "weights",
        "engine": "batching checkpoints distributed models processes recipe types weights",
        "export": "checkpoints convert recipe",
    },
    {
        "telemetry": "checkpoints engine processes recipe tracing weights",
        "rollouts": "batching checkpoints engine processes prompts recipe rewards tracing types",
        "launch": "distributed engine processes recipe rewards trainer types weights",
        "sft": "batching convert distributed losses prompts recipe trainer types",
    },
    {
        "evaluation": "batching checkpoints engine fit launch models processes prompts recipe rewards rollouts types",
        "plan": "checkpoints distributed logits losses models processes recipe rollouts trainer update_report "
        "weights",
    },
    {
        "controller": "batching checkpoints distributed engine evaluation fit launch models processes prompts recipe "
        "rewards rollouts safe_load telemetry tracing trainer types weights",
        "report": "checkpoints fit plan processes recipe update_report",
    },
    {
        "page": "batching checkpoints fit plan processes recipe report rollouts types update_report",
    },
    {
        "commands": "checkpoints controller evaluation export launch page processes recipe report rollouts sft",
    },
    {
        "study": "checkpoints fit processes recipe tiny",
        "doctor": "checkpoints distributed launch plan processes recipe rewards",
    },
    {
        "slurm": "checkpoints controller doctor fit plan recipe",
    },
    {
        "__main__": "environment processes",
    },
]
"""Each floor's packages and modules of the top level, and what they import of the floors below."""


def packages_in(node, names):
    """The packages that one import statement of `node` imports from."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level:
        raise AssertionError(f"line {node.lineno}: expected absolute imports")
    elif isinstance(node, ast.ImportFrom):
        found = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return set()
    parts = [name.split(".") for name in found]
    return {p[1] for p in parts if p[0] == PACKAGE.name and len(p) > 1 and p[1] in names}


def imports():
    """Package -> what it imports, whether at the top of a module, in a function or for types only."""
    names = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()} - {"__init__"}
    found = {name: set() for name in names}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if name != "__init__":
                found[name] |= packages_in(node, names) - {name}
    return found


def test_every_package_imports_what_the_table_says_and_nothing_else():
    said = {name: set(below.split()) for floor in FLOORS for name, below in floor.items()}
    assert imports() == said


def test_every_imported_module_exists():
    """The type checker lets a missing one pass: packages without types look the same to it."""
    missing = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.module}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name
        for place in [PACKAGE.parent.joinpath(*node.module.split("."))]
        if not place.with_suffix(".py").is_file() and not (place / "__init__.py").is_file()
    ]
    assert missing == []


def test_no_package_imports_from_its_own_floor_or_above():
    below = set()
    for floor in FLOORS:
        for name, imported in floor.items():
            assert set(imported.split()) <= below, name
        below |= floor.keys()

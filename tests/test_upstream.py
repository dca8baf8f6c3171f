"""docs/upstream.md lists where this package reaches inside vLLM and Megatron-Core, and its lines are right.

Why this matters: a name that upstream moves is found here, by name, before an engine fails to start on a cluster.
"""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from changed import nodes
from programs import ROOT

PACKAGE = ROOT / "megatron_scalerl"
VLLM, MEGATRON = (
    re.findall(r"^\| ([\w/]+\.py):(\d+) \| (\w+) \| ([^|]+) \|", part, re.MULTILINE)
    for part in (ROOT / "docs/upstream.md").read_text().split("## Megatron-Core")
)


def upstream(package, file):
    spec = find_spec(package)  # imports no more than the parent package
    assert spec is not None and spec.submodule_search_locations
    return (Path(next(iter(spec.submodule_search_locations))) / file).read_text().splitlines()


@pytest.mark.parametrize(
    "package, file, line, name",
    [(package, *row[:3]) for package, rows in (("vllm", VLLM), ("megatron.core", MEGATRON)) for row in rows],
)
def test_upstream_has_the_name_on_its_line(package, file, line, name):
    assert re.search(rf"\b{name}\b", upstream(package, file)[int(line) - 1])


def test_the_files_that_are_listed_with_a_name_use_it():
    for _, _, name, users in VLLM + MEGATRON:
        for user in users.split(", "):
            assert re.search(rf"\b{name}\b", (PACKAGE / user).read_text()), (name, user)


PUBLIC = {
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.factory",
    "vllm.model_executor.layers",
    "vllm.model_executor.model_loader.reload",
    "vllm.sampling_params",
    "vllm.v1.engine.core_client",
    "vllm.v1.sample.logits_processor.interface",
}
"""Modules of vLLM whose names its documentation describes, or of which the page lists attributes."""


def test_every_import_from_inside_vllm_is_listed():
    listed = {("vllm." + file.removesuffix(".py").replace("/", "."), name) for file, _, name, _ in VLLM}
    imported = {
        (node.module, alias.name)
        for path in PACKAGE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(imported) > 15
    assert {
        (module, name) for module, name in imported - listed if module not in PUBLIC or name.startswith("_")
    } == set()

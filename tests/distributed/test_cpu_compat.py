"""The CPU patches are opt-in, refuse GPUs, and name the Megatron-Core that they were written for."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_scalerl.distributed import cpu_compat


def test_installed_megatron_core_is_the_version_of_the_patches() -> None:
    """Another Megatron-Core fails here by name: read every patch's upstream lines before moving the pin."""
    assert version("megatron-core") == cpu_compat.MEGATRON_CORE_VERSION == "0.16.1"
    cpu_compat.check_version()


def test_another_version_is_refused_with_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compat, "MEGATRON_CORE_VERSION", "0.99.0")
    with pytest.raises(ValueError, match=r"expected version 0\.99\.0.*found 0\.16\.1"):
        cpu_compat.install()


def test_a_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="expected no visible GPU, found one"):
        cpu_compat.install()


def test_importing_the_seam_patches_nothing() -> None:
    """In a process of its own: current_device still raises after the import."""
    code = (
        "import torch, megatron_scalerl.distributed.device, megatron_scalerl.distributed.cpu_compat\n"
        "try:\n    torch.cuda.current_device()\nexcept (AssertionError, RuntimeError):\n    print('untouched')\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "untouched"


REPLACES = {
    "current_device": r"torch\.cuda\.current_device\(\)",
    "rng_state": r"rng_state|CPU RNG state changed|torch\.cuda\.manual_seed",
    "device_literal": r"""device=["']cuda["']""",
    "cuda_method": r"\.cuda\(\)",
    "type_name": r"\.type\(\) (==|in) .*torch\.cuda\.\w+Tensor",
    "synchronize": r"torch\.cuda\.synchronize\(\)",
    "dispatcher_stream": r"torch\.cuda\.(current_stream|Stream)\(\)",
    "router_gemm": r"te_general_gemm is not None",
    "router_not_compiled": r"@jit_fuser\s+def _apply_expert_bias",
    "split_sizes": r"tensor\.is_cuda|maybe_move_tensor_to_cpu",
    "uneven_gather": r"torch\.distributed\.all_gather\(",
    "adamw_state_before_first_step": r"assert len\(steps\) == 1",
    "adamw_step_of_loaded_state": r"copy_\(tensors\[key\]\)",
    "adamw_step_per_parameter": r"step = torch\.tensor\(steps\[0\]",
}
"""Patch -> what every place that it names contains in the installed Megatron-Core."""


def places(patch: str) -> Iterator[tuple[str, int, int]]:
    """(file below megatron/core, first line, last line) of every place that the patch names."""
    if patch == "device_literal":
        named = re.findall(r'"([\w.]+)",  # ([\d, ]+)\n', inspect.getsource(cpu_compat))
        assert [module for module, _ in named] == list(cpu_compat.LITERAL_FILES)
        found = [(module.replace(".", "/") + ".py", lines) for module, lines in named]
    else:
        text = re.sub(r"\s*\(.*?\)", "", cpu_compat.PATCHES[patch].__doc__ or "", flags=re.DOTALL)
        found = re.findall(r"([\w/]+\.py):(\d+(?:-\d+)?(?:,\s*\d+(?:-\d+)?)*)", text)
    for file, lines in found:
        for part in lines.split(","):
            first, _, last = part.strip().partition("-")
            yield file, int(first), int(last or first)


@pytest.mark.parametrize("patch", cpu_compat.PATCHES)
def test_every_patch_names_the_upstream_lines_that_it_replaces(patch: str) -> None:
    """Read in the installed Megatron-Core: each place exists and contains the call, literal or assertion."""
    core = Path(importlib.import_module("megatron.core").__file__ or "").parent
    named = list(places(patch))
    assert named
    for file, first, last in named:
        lines = (core / file).read_text(encoding="utf8").splitlines()
        # a decorator takes effect on the line below it
        upstream = "\n".join(lines[first - 1 : last + (lines[first - 1].strip().startswith("@"))])
        assert re.search(REPLACES[patch], upstream), f"{file}:{first}: found {upstream!r}"

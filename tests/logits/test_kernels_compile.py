"""The Triton kernels compiled for a Hopper GPU, which needs none: the compiler and assembler come with Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
from compile_facts import CASES, opcodes, spills


@pytest.fixture(autouse=True)
def nothing_from_an_earlier_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def instructions(name: str) -> list[str]:
    return opcodes(CASES[name].compiled())


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_gradient_kernel_moves_16_bytes_at_a_time(entropy: bool, split: bool) -> None:
    names = instructions(f"logit_gradient{' entropy' * entropy}{' bf16x2' * split}")
    assert "LDG.E.128" in names and "STG.E.128" in names and not spills(names)
    assert sum(name.startswith("STG") for name in names) == (4 if split else 2)


@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_overwritten_in_place_has_been_read(entropy: bool) -> None:
    """In the loop all warps wait for each other between the loads of a block and the first store of its gradient."""
    names = instructions(f"gradient_in_place{' entropy' * entropy}")
    stores = [place for place, name in enumerate(names) if name.startswith("STG")]
    loads = [place for place, name in enumerate(names) if name == "LDG.E.128"]
    barriers = [place for place, name in enumerate(names) if name.startswith("BAR.SYNC")]
    assert len(barriers) == 1 and loads[-1] < barriers[0] < stores[0]
    assert "STG.E.128" in names and not spills(names)


def test_statistics_kernel_stays_in_registers() -> None:
    names = instructions("row_statistics fp32")
    assert "LDG.E.128" in names and not spills(names)


@pytest.mark.parametrize("bits", ["i16", "i32", "i64"])
def test_sum_kernel_of_digests_stays_in_registers(bits: str) -> None:
    names = instructions(f"weighted_sum {bits}")
    assert any(name.startswith("LDG.E") for name in names) and not spills(names)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fused_kernel_runs_its_loop_without_spills(dtype: str) -> None:
    """bf16 on tensor cores (wgmma), fp32 on scalar units: nothing is rounded to TF32."""
    names = instructions(f"fused_statistics {dtype}")
    products = [place for place, name in enumerate(names) if name.startswith("HGMMA" if dtype == "bf16" else "FFMA")]
    assert not [name for name in names if "TF32" in name] and len(products) >= 4
    assert (dtype == "bf16") == any("HGMMA" in name for name in names)
    if dtype == "bf16":
        assert not spills(names[products[0] : products[-1]])
    else:
        assert not spills(names)

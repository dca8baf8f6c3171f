"""The Triton kernels compiled for a Hopper GPU, which needs none: the compiler and assembler come with Triton."""

import pytest
from compile_facts import CASES, opcodes, spills


@pytest.fixture(autouse=True)
def nothing_from_an_earlier_run(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def instructions(name):
    return opcodes(CASES[name].compiled())


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_gradient_kernel_moves_16_bytes_at_a_time(entropy, split):
    names = instructions(f"logit_gradient{' entropy' * entropy}{' bf16x2' * split}")
    assert "LDG.E.128" in names and "STG.E.128" in names and not spills(names)
    assert sum(name.startswith("STG") for name in names) == (4 if split else 2)


def test_statistics_kernel_stays_in_registers():
    names = instructions("row_statistics")
    assert "LDG.E.128" in names and not spills(names)


@pytest.mark.parametrize("bits", ["i16", "i32", "i64"])
def test_sum_kernel_of_digests_stays_in_registers(bits):
    names = instructions(f"weighted_sum {bits}")
    assert any(name.startswith("LDG.E") for name in names) and not spills(names)

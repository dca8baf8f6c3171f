"""Constants of several measurements, and the planner's figures of a decode step, by hand."""

from types import SimpleNamespace

import bench_decode
import pytest
from harness import write_constants

from megatron_scalerl.plan.assumptions_file import read_assumptions
from megatron_scalerl.plan.hardware import GIB

H100 = "NVIDIA H100 80GB HBM3"


def test_medians_but_the_largest_reserve_of_one_kind_of_layers(tmp_path):
    measured = [
        ("te", {"dense_utilization": 0.4, "runtime_gib": 1.5, "mfu": 0.3}),
        ("te", {"dense_utilization": 0.2, "runtime_gib": 2.5}),
        ("plain", {"dense_utilization": 0.1}),
        (None, {"engine_step_ms": 4.0, "fragmentation": -1.0}),
    ]
    found = write_constants(tmp_path / "file.yaml", measured, gpu=H100, source="a test")
    assert found == pytest.approx({"dense_utilization": 0.3, "runtime_gib": 2.5, "engine_step_ms": 4.0})
    read = read_assumptions(tmp_path / "file.yaml")
    assert (read.gpu, read.layers, {n: m.value for n, m in read.assumptions.items()}) == ("h100-80g", "te", found)


def test_nothing_measured_leaves_no_file(tmp_path):
    assert write_constants(tmp_path / "file.yaml", [], gpu=H100, source="a test") == {}
    assert not (tmp_path / "file.yaml").exists()


def test_a_decode_step_is_a_fixed_time_and_the_weights():
    """1.675e9 parameters that are read, in 2 ms beyond the tiny policy's 3: half of an H100's 3.35 TB/s."""
    parameters = SimpleNamespace(total=1_775_000_000, embedding=100_000_000)
    found = bench_decode.rates({1: 3e-3}, {1: 5e-3}, parameters, gpu=H100, freed=2 * parameters.total + 7 * GIB)
    assert found == pytest.approx(
        {"gpu": H100, "engine_step_ms": 3.0, "hbm_efficiency": 0.5, "engine_overhead_gib": 3.0}
    )
    assert found.keys() == {"gpu", "engine_step_ms", "hbm_efficiency", "engine_overhead_gib"}
    assert bench_decode.rates({1: 3e-3}, {1: 2e-3}, parameters, gpu="another", freed=None).keys() == {
        "gpu",
        "engine_step_ms",
    }

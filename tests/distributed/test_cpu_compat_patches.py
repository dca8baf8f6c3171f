"""Every CPU patch is still needed by the installed Megatron-Core, and works.

Why this matters: a patch that upstream has made unnecessary hides upstream's behavior. If the first half of a test
fails, remove the patch. Not exercised: GPUs, where only the patches of WITHOUT_TE apply.
"""

import pytest
import random_policies
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NO_GPU = "CUDA|NVIDIA"
EXPECTED = {
    "current_device": (NO_GPU, "cpu"),
    "rng_state": (NO_GPU, True),
    "device_literal": (NO_GPU, [[False, True], [False, False]]),
    "cuda_method": (NO_GPU, [1.0, 1.0]),
    "type_name": ("AssertionError", 1.0),
    "synchronize": (NO_GPU, None),
    "streams": ("Stream|" + NO_GPU, True),
    "router_not_compiled": ("goes through torch.compile", True),
    "split_sizes": ("TypeError: .*incompatible function arguments", True),
    "uneven_gather": ("invalid tensor size", [0.0, 1.0, 1.0]),
    "adamw_state_before_first_step": ("AssertionError", True),
    "adamw_step_of_loaded_state": ("KeyError: 'step'", True),
    "adamw_step_per_parameter": ("after two steps parameters have counted", True),
}
"""patch -> (what upstream does without it, what the probe answers with it)"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "llama4"
    random_policies.make("llama4", path)
    return run_ranks(2, "cpu_compat_ranks:probe_all", str(path))[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_patch_is_needed_and_works(name, probed):
    without, with_all = probed[name]
    error, answer = EXPECTED[name]
    assert without, f"upstream works without the patch {name}: remove it"
    pytest.fail(without) if not _matches(error, without) else None
    assert with_all == answer


def test_every_patch_has_a_probe(probed):
    patches, probes = probed["names"]
    assert patches == probes == sorted([*EXPECTED, "router_gemm"])


def test_the_routers_product_without_transformer_engine_needs_no_patch(probed):
    assert probed["router_gemm"] == ("", True)


def test_uninstall_puts_everything_back(probed):
    assert probed["restored"]


def _matches(pattern, text):
    import re

    return re.search(pattern, text, re.DOTALL) is not None

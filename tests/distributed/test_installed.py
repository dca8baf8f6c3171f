"""Versions of packages against the ones that setup.cfg pins: a warning for others, a refusal for broken ones.

Why this matters: a version that breaks says so after hours of a queue, or computes something else in silence.
"""

import logging

import pytest

from megatron_scalerl.distributed.installed import check_installed, installed_versions


def test_the_installed_versions_are_pinned(caplog):
    assert {"torch", "megatron-core"} <= installed_versions().keys()
    check_installed()
    assert not caplog.records


@pytest.mark.parametrize(
    "package, version, expected",
    [
        ("megatron-core", "0.19.2", ""),
        ("torch", "2.13.0+cu130", ""),
        (
            "megatron-core",
            "0.20.0",
            "megatron-core 0.20.0 is installed and has not been tested: setup.cfg pins ==0.19.2",
        ),
        ("torch", "2.14.0", "torch 2.14.0 is installed and has not been tested: setup.cfg pins ==2.13.0"),
        ("vllm", "0.31.0", "vllm 0.31.0 is installed and has not been tested: setup.cfg pins ==0.32.0"),
    ],
)
def test_an_unknown_version_is_one_warning(package, version, expected, caplog):
    with caplog.at_level(logging.WARNING):
        check_installed({package: version})
    assert [record.getMessage() for record in caplog.records] == [expected] * bool(expected)


@pytest.mark.parametrize(
    "versions, message",
    [
        ({"megatron-core": "0.16.1"}, "megatron-core: 0.16.1 does not work: this version computes wrong gradients"),
        ({"vllm": "0.33.0"}, "vllm: 0.33.0 does not work: this version has moved modules"),
    ],
)
def test_a_version_that_breaks_is_refused(versions, message):
    with pytest.raises(ValueError, match=message):
        check_installed(versions)

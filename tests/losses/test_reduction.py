"""The three means as token weights."""

import subprocess
import sys

import pytest

from megatron_scalerl.losses.reduction import token_weights

LENGTHS = [[2, 6], [1, 3, 4]]  # two prompts: T = 8 and 8, with 2 and 3 completions


def total(weights, lengths):
    return sum(w * n for group, sizes in zip(weights, lengths) for w, n in zip(group, sizes))


@pytest.mark.parametrize(
    "reduction, lengths, expected",
    [
        ("prompt_mean", LENGTHS, [[1 / 16] * 2, [1 / 16] * 3]),
        ("prompt_mean", [[4], [1, 1]], [[1 / 8], [1 / 4] * 2]),
        ("sequence_mean", LENGTHS, [[1 / 8, 1 / 24], [1 / 6, 1 / 18, 1 / 24]]),  # 1 / (N G |y|)
        ("token_mean", [[4], [1, 1]], [[1 / 6], [1 / 6] * 2]),
    ],
)
def test_weights_by_hand_sum_to_one(reduction, lengths, expected):
    weights = token_weights(lengths, reduction)
    assert weights == [pytest.approx(group) for group in expected]
    assert total(weights, lengths) == pytest.approx(1.0)


@pytest.mark.parametrize("reduction", ["prompt_mean", "sequence_mean", "token_mean"])
def test_completions_without_loss_tokens_weigh_nothing(reduction):
    assert token_weights([[0, 0]], reduction) == [[0.0, 0.0]]
    assert token_weights([[0, 2]], reduction)[0][0] == 0.0


def test_unknown_reduction():
    with pytest.raises(ValueError, match=r"loss\.reduction is 'mean'"):
        token_weights(LENGTHS, "mean")


def test_the_controllers_modules_do_not_import_torch():
    code = (
        "import sys, megatron_scalerl.losses;"
        "import megatron_scalerl.algorithms, megatron_scalerl.controller.samples, megatron_scalerl.batching.packing;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

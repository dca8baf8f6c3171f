"""The three means as token weights."""

import subprocess
import sys

import pytest

from megatron_scalerl.losses.reduction import token_weights

LENGTHS = [[2, 6], [1, 3, 4]]  # two prompts: T = 8 and 8, with 2 and 3 completions


def total(weights, lengths):
    return sum(w * n for group, sizes in zip(weights, lengths) for w, n in zip(group, sizes))


def test_prompt_mean():
    assert token_weights(LENGTHS, "prompt_mean") == [[1 / 16] * 2, [1 / 16] * 3]
    assert token_weights([[4], [1, 1]], "prompt_mean") == [[1 / 8], [1 / 4] * 2]


def test_sequence_mean():
    expected = [[1 / 8, 1 / 24], [1 / 6, 1 / 18, 1 / 24]]  # 1 / (N G |y|)
    assert token_weights(LENGTHS, "sequence_mean") == [pytest.approx(group) for group in expected]


def test_token_mean():
    assert token_weights([[4], [1, 1]], "token_mean") == [[1 / 6], [1 / 6] * 2]


@pytest.mark.parametrize("reduction", ["prompt_mean", "sequence_mean", "token_mean"])
def test_weights_sum_to_one(reduction):
    assert total(token_weights(LENGTHS, reduction), LENGTHS) == pytest.approx(1.0)


@pytest.mark.parametrize("reduction", ["prompt_mean", "sequence_mean", "token_mean"])
def test_completions_without_loss_tokens_weigh_nothing(reduction):
    assert token_weights([[0, 0]], reduction) == [[0.0, 0.0]]
    assert token_weights([[0, 2]], reduction)[0][0] == 0.0


@pytest.mark.parametrize("name", ["mean", "prompt", "sequence_means", "token", "unknown"])
def test_unknown_reduction(name):
    with pytest.raises(ValueError, match=f"loss.reduction is '{name}'"):
        token_weights(LENGTHS, name)


def test_the_controllers_modules_do_not_import_torch():
    code = (
        "import sys, megatron_scalerl.losses;"
        "import megatron_scalerl.batching.advantages, megatron_scalerl.batching.packing;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

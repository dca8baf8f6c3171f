"""An answer is one and finished: forms that leave something to compute or to choose, and forms that do not."""

import pytest
from answer_forms import FINISHED, FORMS, LEFT_OPEN, NUMBERS, OPEN, RIGHT, SAYINGS

from megatron_scalerl.rewards.math import check_references, verify_math


def paid(texts, reference):
    return [text for text in texts if verify_math(text, reference, {})]


@pytest.mark.parametrize("reference, other", NUMBERS)
def test_a_number_that_is_left_to_compute_or_to_choose_is_no_answer(reference, other):
    right = reference.replace("{,}", ",")
    texts = [saying.format(form) for form in NUMBERS[reference, other] for saying in SAYINGS]
    texts += [saying.format(right=right, other=other) for saying in OPEN]
    assert check_references([reference]) == [""]
    assert paid(texts, reference) == []


@pytest.mark.parametrize("reference", ["14", "\\frac{3}{2}", "-7", "0.75", "1024"])
def test_one_finished_number_is_paid_in_every_form(reference):
    texts = [saying.format(reference) for saying in RIGHT]
    assert paid(texts, reference) == texts


@pytest.mark.parametrize("reference", FORMS)
def test_a_numeral_of_the_same_value_is_paid(reference):
    sayings = ("so \\boxed{{{}}}", "The answer is ${}$.", "<answer>{}</answer>")
    texts = [saying.format(form) for form in FORMS[reference] for saying in sayings]
    assert paid(texts, reference) == texts


@pytest.mark.parametrize("rows, right", [(LEFT_OPEN, False), (FINISHED, True)])
def test_what_readers_tried(rows, right):
    wrong = [row for row in rows if verify_math(row[1], row[0], {"prompt": row[2]}) is not right]
    assert wrong == []

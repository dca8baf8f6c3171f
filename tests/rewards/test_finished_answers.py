"""An answer is one and finished: forms that leave something to compute or to choose, and forms that do not."""

import pytest

from megatron_scalerl.rewards.math import check_references, verify_math

# (reference, another number) -> texts of the same value that leave something to compute
NUMBERS = {
    ("14", "13"): [
        "9 + 5",
        "2*7",
        "15-1",
        "28/2",
        r"\frac{28}{2}",
        r"\sqrt{196}",
        r"2 \times 7",
        r"2 \cdot 7",
        "7(2)",
    ],
    ("1024", "1023"): ["4^5", "2^{10}", "1000 + 24", "32^2", r"2048 \div 2", r"\binom{1024}{1}", "(32)(32)"],
    ("36", "58"): ["94 - 58", "94-58", "6^2", r"6 \times 6", r"\sqrt{1296}", "72/2", "|-36|", r"3!\cdot 6", "6²"],
    (r"\frac{3}{2}", "2"): [
        "1 + 1/2",
        r"1 + \frac12",
        "2 - 0.5",
        r"3 \cdot \frac12",
        "3 * 0.5",
        r"\sqrt{2.25}",
        "3 ÷ 2",
    ],
    ("0.75", "0.7"): ["1 - 0.25", "0.5+0.25", r"3 \cdot 0.25", "0.25*3", "1.5/2"],
    ("-7", "7"): ["8 - 15", "-(3+4)", "-14/2", "3 - 10", r"-\sqrt{49}"],
    (r"25\%", r"30\%"): [r"10\% + 15\%", r"5^2 \%", r"50\%/2"],
    ("1{,}250", "1300"): ["1000 + 250", r"50 \cdot 25", "2500/2", r"1.25 \cdot 1000"],
}
SAYINGS = [
    r"\boxed{{{}}}",
    "The answer is {}.",
    "The final answer is ${}$.",
    "<answer>{}</answer>",
    "Work.\n#### {}",
]
OPEN = [
    r"\boxed{{{other}={right}}}",
    "{other} = {right}",
    "x = {right} = {other}",
    r"\boxed{{{right} = {other}}}",
    "{other} or {right}",
    "{right} or {other}",
    "either {other} or {right}",
    "The answer is {right}, or maybe {other}.",
    "The final answer is {right} and not {other}",
    "The final answer is {other} and not {right}",
    "The answer is {right}. Wait, it is {other}.",
    "The answer is {right}. No, it is {other}.",
    "Is it {right}?",
    "It is not {right}.",
    "The answer is {right}, no, it is {other}.",
    "Perhaps {right}.",
    "It might be {right}.",
    r"\boxed{{{other}}} or \boxed{{{right}}}",
    r"\boxed{{{right}}} or {other}",
    r"\boxed{{{right}}}, or maybe {other}",
    r"\boxed{{{right}}}. Wait, it is {other}.",
    r"maybe \boxed{{{right}}}",
    r"The answer is not \boxed{{{right}}}.",
    "{right}, {other}",
    "{other}, {right}",
    "{other} and {right}",
    r"\boxed{{{right}, {other}}}",
    "{right}/{other}?",
    "The answer is {right}. I am not sure.",
    "The answer is {right}, but it could be {other}.",
    "{right} is wrong.",
    "between {other} and {right}",
    "less than {right}",
    "The answer is {right}. Or {other}.",
    "x > {right}",
    r"\boxed{{{right} \text{{ or }} {other}}}",
    "The answer is {right}; alternatively {other}.",
    "from {other} to {right}",
]
RIGHT = [
    "{}",
    "${}$",
    r"\({}\)",
    "$${}$$",
    "\\[\n{}\n\\]",
    "{}.",
    "**{}**",
    "The answer is {}.",
    "The answer is ${}$.",
    "Answer: {}",
    "**Answer:** {}",
    "The final answer is **{}**.",
    "So the answer is {}",
    "Therefore, x = {}.",
    "x = {}",
    "The answer is 99. Wait, it is {}.",
    "First 99, then 98.\nThe answer is {}.",
    "1. Add 9 and 5.\n2. So it is {}.",
    r"The answer is \boxed{{{}}}.",
    r"$\boxed{{{}}}$",
    r"\boxed{{x = {}}}",
    r"\boxed{{3}}, no, \boxed{{{}}}",
    r"\fbox{{{}}}",
    "<answer>{}</answer>",
    "<answer>x = {}</answer>",
    "#### {}",
    "Final Answer: {}",
    "We get {}",
    "= {}",
    "→ {}",
    "I think the answer is {}.",
    "Since n cannot be negative, the answer is {}.",
    "The answer is {}. I hope this helps!",
    "The answer is {}.\nIt took 3 steps and 2 checks.",
    "{} is the answer.",
    "The total number is {}.",
    r"\boxed{{{}.}}",
    r"\boxed{{{}}}, since 3 + 4 is not 8.",
    "Hence ${}$ is the answer.",
    "The result: {}",
    "`{}`",
    "a = b = {}",
]
FORMS = {
    "14": [
        "14.0",
        "+14",
        "14 apples",
        r"14\text{ apples}",
        r"\$14",
        "14 dollars",
        "9 + 5 = 14",
        r"1.4 \times 10^1",
        r"140 \cdot 10^{-1}",
        "1.4e1",
        r"\mathbf{14}",
        "{14}",
        "014",
        r"14\,",
        r"\frac{14}{1}",
        "28/2 = 14",
        r"\sqrt{196} = 14",
        "(14)",
        r"\approx 14",
        r"14\text{ cm}",
    ],
    r"\frac{3}{2}": ["1.5", "3/2", "6/4", r"\frac{6}{4}", r"1\frac{1}{2}", "1 1/2", r"\dfrac32", r"150\%"],
    r"\frac{1}{3}": ["1/3", r"0.\overline{3}", "0.333333", r"\frac{1}{3} \approx 0.33", r"\tfrac13", "2/6"],
    "1000000": ["10^6", "1{,}000{,}000", "1,000,000", "1 000 000", "1 million", r"1 \times 10^6"],
    r"25\%": ["25", "0.25", r"\frac14", "25 percent", r"25\%"],
    "0.05": [r"5 \times 10^{-2}", "5e-2", r"\frac{1}{20}", r"5\%", ".05", "0.050"],
    "-7": ["-7.0", "−7", "x = -7", r"-\frac{7}{1}", "(-7)", "-(7)"],
}


def paid(texts, reference):
    return [text for text in texts if verify_math(text, reference, {})]


@pytest.mark.parametrize(("reference", "other"), NUMBERS)
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

"""Right answers that are paid and wrong ones that are not, by kind; each reference is accepted before a run."""

import pytest

from megatron_scalerl.rewards.math import check_references, verify_math

KINDS = [
    ("12 cm^2", ("12", "12\\text{ cm}^2", "12\\text{ square centimeters}"), ("12 cm", "12 m^2", "144")),
    ("100 mL", ("100", "100\\text{ milliliters}"), ("100 L", "0.1")),
    ("9.8 m/s^2", ("9.8", "9.8\\,\\mathrm{m/s^2}"), ("9.8 m/s", "9.9")),
    ("60 mph", ("60", "60 miles per hour"), ("60 km/h",)),
    ("72^\\circ C", ("72", "72^\\circ", "72°C"), ("72^\\circ F", "73")),
    ("12 m", ("12m", "12\\text{ meters}"), ("12\\text{ feet}", "12 m^2")),
    ("2 1/2 cups", ("2.5", "2\\frac12\\text{ cups}"), ("1.5",)),
    ("7 days", ("7",), ("7 weeks",)),
    ("40 €", ("40", "€40", "40\\text{ euros}"), ("\\$40",)),
    ("25\\text{ cents}", ("25",), ("\\$25", "0.25")),
    ("5t", ("t\\cdot 5",), ("5", "5 s")),
    ("\\pi r^{2}h", ("\\pi h r^2",), ("\\pi r^2",)),
    ("45", ("45°", "45\\text{ degrees}"), ("45\\text{ or 46}",)),
    ("2:30\\text{ PM}", ("2:30\\text{ PM}",), ("2:30\\text{ AM}",)),
    ("٣٤", ("34", "３４"), ("43",)),
    ("12\\,345", ("12345", "12,345", "12 345"), ("12346", "12.345")),
    ("1234567", ("1\\,234\\,567", "1 234 567", "1{,}234{,}567"), ("1 234 568",)),
    ("-2 3/4", ("-2\\frac34", "-2.75", "-\\frac{11}{4}"), ("-1.25", "2.75")),
    ("3½", ("3.5",), ("31/2", "1.5")),
    (
        "\\frac13",
        ("0.\\overline{3}", "0.\\dot{3}", "0.(3)", "0.333..."),
        ("0.3", "0.\\overline{33}1", "0.\\overline{4}"),
    ),
    ("0.1\\overline{6}", ("\\frac16",), ("0.16",)),
    ("0.\\dot{1}4285\\dot{7}", ("\\frac17",), ("\\frac18",)),
    ("1011_2", ("1011_{2}", "(1011)_2", "1011\\text{ base }2", "1011"), ("1011_3", "1010_2", "13_8", "11")),
    ("1A2_{16}", ("1A2_{16}",), ("2A1_{16}", "1A2_{12}")),
    (
        "\\begin{cases} x=1 \\\\ y=2 \\end{cases}",
        ("x=1,y=2", "\\left\\{\\begin{aligned} x&=1, \\\\ y&=2 \\end{aligned}\\right."),
        ("x=2,y=1", "2", "x=1"),
    ),
    ("[0,1)", ("0 \\le x < 1", "1 > x \\ge 0", "\\{x \\mid 0 \\le x < 1\\}"), ("0 < x < 1", "x(x-1) \\le 0", "x<1")),
    ("(-\\infty,3]", ("x \\le 3", "3 \\ge x"), ("x<3", "2x \\le 8")),
    ("\\{x | x > 2\\}", ("x>2", "(2,\\infty)"), ("x \\ge 2", "[2,\\infty)")),
    ("0\\le x<1", ("1>x\\ge 0", "[0,1)"), ("0\\le y<1",)),
    ("(-\\infty,-1)\\cup(1,\\infty)", ("x<-1 \\text{ or } x>1",), ("x^2>1", "x>1")),
    ("(0,1)\\cup(1,2)", ("0<x<1 \\text{ or } 1<x<2",), ("0<x<2",)),
    ("(1,2)", ("1<x<2", "\\langle 1,2\\rangle"), ("x^2-3x+2<0",)),
    ("\\text{Rs. }500", ("500", "500\\text{ rupees}"), ("\\$500",)),
    ("e^{i\\pi}", ("-1",), ("1", "e^\\pi")),
    ("\\sin 30^\\circ", ("\\frac12", "\\cos 60^\\circ"), ("\\sin 30",)),
    ("\\frac{4}{5}i", ("0.8i",), ("0.8", "-0.8i")),
    ("C_{10}^{3}", ("120", "\\binom{10}{3}"), ("720",)),
    ("\\varnothing", ("\\emptyset", "∅"), ("0", "\\{0\\}")),
    ("2 ≤ x ≤ 5", ("[2,5]",), ("2<x<5",)),
    ("√2", ("\\sqrt2",), ("2",)),
    ("x²", ("x^2",), ("2x",)),
    (
        "34",
        ("34.", "\\boldsymbol{34}", "\\color{red}{34}", "\\text{The answer is } 34"),
        ("\\text{not } 34", "34, 35"),
    ),
    ("B", ("\\textbf{(B)}\\ 12", "B) 12", "\\text{The answer is B}"), ("A", "(A) 12 (B) 13", "B, C", "AB", "12")),
    ("Yes", ("yes", "\\text{Yes}."), ("No", "\\text{Yes or no}", "\\text{Not yes}")),
    ("No", ("\\text{no}",), ("Yes", "on")),
    ("True", ("\\text{true}",), ("False", "T")),
    ("listen", ("\\text{Listen}",), ("silent",)),
    ("\\frac{1}{2^{98}}", ("2^{-98}",), ("\\frac{1}{2^{99}}", "0")),
    ("7.02\\times10^{-23}", ("7.02e-23",), ("6.02\\times10^{-23}", "0")),
    ("0.123456789", ("\\frac{123456789}{1000000000}", "0.123457"), ("0.123456788", "0.123456")),
    ("\\frac{123456789}{987654321}", ("0.124999998860938",), ("0.125", "0.124999")),
    ("0.333333", ("\\frac13",), ("0.333334",)),
    ("\\sqrt2", ("1.414214",), ("1.414213", "1.41")),
    ("0.00012345", ("1.2345e-4",), ("0.000123",)),
    ("\\frac{\\pi}{10^{20}}", ("\\pi\\cdot10^{-20}",), ("\\frac{\\pi}{10^{21}}", "0")),
    ("x+10^{-20}", ("10^{-20}+x",), ("x", "x+2\\cdot10^{-20}")),
    ("6.02\\times10^{23}", ("602000000000000000000000",), ("602000000000000000000001",)),
    ("10^{11}\\sqrt2", ("\\sqrt2\\cdot10^{11}",), ("10^{11}\\sqrt2+1",)),
    ("\\sqrt{3+2\\sqrt2}", ("1+\\sqrt2",), ("1+\\sqrt3",)),
    ("5 apples", ("5", "5~\\text{apples}", "\\text{5 apples}", "\\text{Total: } 5"), ("5 or six apples", "6 apples")),
    (
        "2000000",
        ("2\\text{ million}", "2 million", "\\$2\\text{ million dollars}"),
        ("2", "2\\text{ billion}", "2000000 alpha"),
    ),
    ("3 dozen", ("36", "3\\text{ dozen eggs}"), ("3",)),
    ("2", ("2\\ ",), ("2\\text{ thousand}", "2\\text{ squared}", "2\\text{ halves}", "2\\text{, maybe three}")),
    ("0", ("-0",), ("10^{-60}", "0." + "0" * 50 + "1")),
    ("12.5\\%", ("12.5", "0.125"), ("125",)),
    ("2\\frac12\\%", ("2.5\\%", "\\frac52\\%", "0.025"), ("25\\%",)),
    ("32,\\!348", ("32348", "\\$32,\\!348", "32{,}348"), ("32349", "32,34")),
    ("\\frac{\\pi}{3}", ("\\frac{\\pi}{3}\\text{ radians}", "\\frac13\\pi"), ("60\\text{ radians}",)),
    ("98.6^\\circ F", ("98.6^\\circ\\text{F}", "98.6"), ("98.6^\\circ\\text{C}",)),
    ("2A_{16}", ("2A_{\\text{sixteen}}",), ("2A_{\\text{twelve}}", "2B_{16}")),
    ("3:2", ("3\\text{ to }2",), ("2:3", "2\\text{ to }3")),
    (
        "12",
        ("12\\text{ (since }3\\times4=12)", "12 (because 3*4=12)"),
        ("13\\text{ (since }3\\times4=12)", "12 (13)"),
    ),
    ("\\pm\\sqrt3", ("\\sqrt3, -\\sqrt3",), ("\\sqrt3", "\\sqrt3, \\sqrt3")),
    ("1, -1", ("\\pm 1", "-1, 1"), ("1", "\\pm 2")),
    ("-34", ("-$34$",), ("$34$", "34")),
    (
        "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
        ("\\left(\\begin{array}{c} 1 \\\\ 2 \\end{array}\\right)",),
        ("(1)",),
    ),
    ("circle", ("\\text{a circle}", "\\text{The circles}."), ("\\text{ellipse}", "\\text{circle or ellipse}")),
    ("0.5", ("50\\%",), ("0.5\\%",)),
    (
        "\\begin{pmatrix} 10^{-20} \\\\ 1 \\end{pmatrix}",
        (),
        ("\\begin{pmatrix} 2\\cdot 10^{-20} \\\\ 1 \\end{pmatrix}",),
    ),
    ("\\$36", ("36", "36.00"), ("37",)),
    ("1e-07", ("1 \\times 10^{-7}",), ("2.5e-7",)),
    ("1.5E+3", ("1500",), ("2.5e-7",)),
    ("0.00015", ("1.5e-4",), ("2.5e-7",)),
    ("ln(2)", ("\\ln 2",), ("2.5e-7",)),
    ("2 log(x)", ("2\\log x",), ("2.5e-7",)),
    ("sin(pi/6)", ("\\frac{1}{2}",), ("2.5e-7",)),
    ("arctan(2)", (), ("2.5e-7",)),
    ("\\exp(2)", ("exp(2)",), ("2.5e-7",)),
    ("1 000 000", ("1000000",), ("0",)),
    ("2 1/2", ("2.5",), ("1.5",)),
    ("pi/2", ("\\frac{\\pi}{2}",), ("ip/2",)),
    ("2pi", ("2\\pi",), ("2",)),
]


@pytest.mark.parametrize("reference, right, wrong", KINDS)
def test_answers_of_each_kind(reference, right, wrong):
    assert check_references([reference]) == [""]
    answers = (reference, *right, *wrong)
    paid = [answer for answer in answers if verify_math(f"so \\boxed{{{answer}}}", reference, {})]
    assert paid == [reference, *right]


WORDS = [
    ("B", ("The answer is B.", "**Answer:** B", "The correct option is (B).", "Answer: $\\text{(B)}$", "(B)")),
    ("B", ("<answer>(B) 12</answer>", "#### B", "Option A is wrong.\nThe answer is (B) 12.")),
    ("No", ("The answer is no.", "<answer>No</answer>", "no")),
]
OTHER_WORDS = [
    ("B", ("The answer is C.", "Answer: B or C", "Answer: B, C", "The answer is A, B, C or D.", "A B C D")),
    ("B", ("Since option B is wrong, the answer is D.", "B is good, but the answer is C.")),
    ("No", ("The answer is yes.", "Answer: yes or no", "I know no answer", "No. The answer is yes.")),
]


@pytest.mark.parametrize("rows, right", [(WORDS, True), (OTHER_WORDS, False)])
def test_a_word_or_a_letter_is_the_whole_answer(rows, right):
    for reference, answers in rows:
        assert [verify_math(answer, reference, {}) for answer in answers] == [right] * len(answers), answers


def test_a_reference_that_is_taken_for_another_one_is_refused():
    (problem,) = check_references(["x = 4 = 5"])
    assert problem.startswith("'x = 4 = 5' and 'x = 5 = 5' compare as equal")


@pytest.mark.parametrize("reference", ["12 cm^2", "\\frac{x}{3}", "0.1\\overline{6}", "(1,2]"])
@pytest.mark.parametrize("equal, problem", [(False, "do not compare as equal"), (True, " compare as equal")])
def test_each_reference_is_tried_on_its_own_forms_and_on_a_neighbour(reference, equal, problem, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rewards.math.is_equal", lambda *_: equal)
    assert problem in check_references([reference])[0]


@pytest.mark.parametrize("repeated", ["cm ", "$ ", "\\, ", " ", "\\unit ", "m/", "m ^5 "])
def test_a_text_of_units_and_spaces_alone_is_read_at_once(repeated):
    assert verify_math(f"\\boxed{{5 {(repeated * 60)[:180]}!}}", "7", {}) is False

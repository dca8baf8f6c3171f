"""No text is executed as code: what Python compiles while hostile answers are checked."""

import json
import re
import subprocess
import sys
from pathlib import Path

CALL = "__import__('os').system('touch pwned')"
HOSTILE = [
    CALL,
    f"$ {CALL} $",
    f"\\boxed{{{CALL}}}",
    f"\\boxed{{\\text{{{CALL}}}}}",
    f"\\boxed{{\\mathrm{{{CALL}}}}}",
    f"\\boxed{{\\{{{CALL}, 1\\}}}}",
    f"\\boxed{{x_{{{CALL}}}}}",
    f"\\boxed{{f({CALL})}}",
    f"\\boxed{{\\max({CALL}, 1)}}",
    f"\\boxed{{\\gcd(4, \\text{{{CALL}}})}}",
    f"\\boxed{{\\variable{{{CALL}}}}}",
    f"\\boxed{{\\begin{{pmatrix}}{CALL}\\end{{pmatrix}}}}",
    "\\boxed{\\operatorname{eval}(pwned)}",
    "\\boxed{\\operatorname{exec}(pwned)=1}",
    "\\boxed{\\operatorname{breakpoint}(1)}",
    "\\boxed{\\operatorname{open}(7)=x}",
    "\\boxed{\\operatorname{exit}(x)=x^5+x+1}",
    "\\boxed{exec(x)+system(x)}",
    "(1).__class__.__mro__",
    "1+1;import os",
    "1 + 1 (2) (3)",
    "9.9.9+(1)*(2)()",
    "answer: we all get 1+2 as they say",
    "1+\n\n2",
    "\u0663+\u0664*(1)",
    f"answer: 1+1\\\n{CALL}",
    f"final answer is 1+1 {CALL} I hope",
]
# From Python 3.12 on digits of other scripts are names to its tokenizer: sympy quotes them, as Symbols.
ARITHMETIC = re.compile(r"(Integer|Float|Rational|Symbol \('\d+' \)|[\s\d.+*/()'-])*")
SYMPYS_OWN = re.compile(r"from sympy import \*|def monomial_((?!import|system|pwned|exec|eval)[\w\s(),=+*<>:-])*")


def events_of(answers, folder):
    watched = subprocess.run(
        [sys.executable, Path(__file__).parent / "watched_math.py"],
        input=json.dumps(answers),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
    )
    assert watched.returncode == 0, watched.stderr
    return json.loads(watched.stdout)


def test_hostile_answers_compile_nothing_but_arithmetic(tmp_path):
    events = events_of(HOSTILE, tmp_path)
    compiled = [what for event, what in events if event == "compile" and not what.startswith("<ast.Expression")]
    assert "Integer (1 )+Integer (2 )" in compiled, "plain arithmetic goes through parse_expr: the watch sees it"
    foreign = [source for source in compiled if not (ARITHMETIC.fullmatch(source) or SYMPYS_OWN.fullmatch(source))]
    assert foreign == []
    # a SyntaxError of such arithmetic looks for its line in a file of the name that parse_expr gave it
    assert [event for event in events if event[0] != "compile" and event != ["open", "<unknown>"]] == []
    assert list(tmp_path.iterdir()) == []

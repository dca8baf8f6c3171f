"""Checks answers with the math verifier and reports what Python compiled, started and opened meanwhile.

Run as a program: answers as JSON on stdin, events as JSON on stdout, one list [event, what] for each.
"""

import json
import sys
import warnings

from megatron_scalerl.rewards import math

WATCHED = ("compile", "os.", "subprocess.", "socket.", "ctypes.", "pty.", "shutil.", "builtins.input", "open")


def main():
    warnings.simplefilter("ignore")
    answers = json.load(sys.stdin)
    math.warm_up()
    for reference in ("7", "x=3", "\\{1,2\\}"):  # what sympy imports late, it imports now
        for answer in ("\\boxed{x=2}", "\\boxed{\\{x,1\\}}", "\\boxed{f(x)=\\sin x}", "1+2*3", "\\boxed{\\max(1,2)}"):
            math.verify_math(answer, reference, {})
    events = []

    def watch(event, arguments):
        if event.startswith(WATCHED):
            what = arguments[0] if arguments else ""
            events.append([event, what.decode() if isinstance(what, bytes) else str(what)])

    sys.addaudithook(watch)
    for answer in answers:
        for reference in ("7", "x=3", "\\{1,2\\}", answer):
            math.verify_math(answer, reference, {})
    json.dump(events, sys.stdout)


if __name__ == "__main__":
    main()

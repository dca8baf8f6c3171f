"""Scores of completions.

pool.py     asyncio pool of verifier processes, one for each task of a mixture; runs in the controller
worker.py   main of a verifier process: loads the verifier, runs checks
forms.py    forms of a reference: a working verifier gives a reward for at least one form
limits.py   resource limits of a check, applied in the verifier process
code.py     the verifier `code`; code_tests.py reads unit tests
sandbox*.py runs a program in isolation: sandbox.py from outside, sandbox_init.py and sandbox_root.py build the
            sandbox, sandbox_seccomp.py filters system calls, sandbox_guest.py runs the program inside,
            sandbox_probe.py tries whether a host can isolate programs
math.py     the verifier `math`
"""

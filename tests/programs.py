"""Programs in processes of their own, as a user starts them."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def ended(*argv, cwd=ROOT, timeout=300, **variables):
    """A program that has ended, with its output as text. variables: more of its environment."""
    argv = [*map(str, argv)]
    env = os.environ | variables
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def printed(*argv, **options):
    """What a program prints that succeeds."""
    done = ended(*argv, **options)
    assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout

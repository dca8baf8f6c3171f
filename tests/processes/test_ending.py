"""`end_with`: exit codes and output of programs that end without Python's cleanup."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ended(body, **options):
    """A process whose `main` has this body."""
    program = "import atexit, sys\nfrom megatron_scalerl.processes.child_process import end_with\n"
    program += f"def main():\n    {body}\n"
    program += "atexit.register(print, 'cleanup')\nend_with(main)\n"
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize(
    "body, code, output, errors",
    [
        ("print('done')", 0, "done\n", ""),
        ("print('done', end='')\n    return 75", 75, "done", ""),
        ("sys.exit(3)", 3, "", ""),
        ("sys.exit()", 0, "", ""),
        ("sys.exit('expected this, found that')", 1, "", "expected this, found that\n"),
        ("raise SystemExit(True)", 1, "", ""),
    ],
)
def test_the_exit_code_is_that_of_the_program(body, code, output, errors):
    done = ended(body)
    assert (done.returncode, done.stdout, done.stderr) == (code, output, errors)


@pytest.mark.parametrize("error", ["RuntimeError('lost')", "KeyboardInterrupt('lost')"])
def test_an_exception_is_printed(error):
    done = ended(f"print('begun')\n    raise {error}")
    assert (done.returncode, done.stdout) == (1, "begun\n")
    assert done.stderr.startswith("Traceback") and done.stderr.endswith(f"{error.partition('(')[0]}: lost\n")


def test_output_that_cannot_be_written_is_a_failure():
    with open("/dev/full", "w") as full:
        assert ended("print('done')", stdout=full).returncode == 1


def test_a_stream_that_was_closed_at_the_start_is_no_failure():
    program = "from megatron_scalerl.processes.child_process import end_with\nend_with(lambda: 75)"
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(closed, cwd=ROOT).returncode == 75


def test_threads_and_what_waits_for_them_end_with_the_program():
    """A thread that would keep Python from ending; gloo's groups have such ones in C++."""
    done = ended("import threading, time\n    threading.Thread(target=time.sleep, args=(1e6,)).start()", timeout=240)
    assert done.returncode == 0

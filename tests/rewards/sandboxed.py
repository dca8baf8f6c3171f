"""Programs in a sandbox with small limits, for the tests of the verifier `code`."""

from megatron_scalerl.rewards.code import verify_code
from megatron_scalerl.rewards.limits import Limits
from megatron_scalerl.rewards.sandbox import Sandbox

LIMITS = Limits(cpu_s=5.0, memory_mb=256, file_mb=1)


def output(program, given="", *, limits=LIMITS, limit=1 << 16):
    """The Result of one run."""
    with Sandbox(limits) as sandbox:
        (result,) = sandbox.run(program, [given], [limit])
    return result


def prints(program, **options):
    """What a program prints; it has to end well."""
    result = output(program, **options)
    assert result.code == 0, result
    return result.output.decode().strip()


def answer(program):
    """An answer with this program."""
    return f"So:\n```python\n{program}\n```\n"


def verdict(program, tests, *, limits=LIMITS):
    """What the verifier says of an answer with this program."""
    return verify_code(answer(program), tests, {}, limits=limits)

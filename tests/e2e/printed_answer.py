"""A verifier for a policy that writes numbers: the program that prints its answer has to pass the problem's tests."""

from megatron_scalerl.rewards.code import verify_code
from megatron_scalerl.rewards.limits import Limits

LIMITS = Limits(cpu_s=10.0, memory_mb=512, file_mb=0)


def verify(answer_text, reference, extra):
    """True if all tests of `reference` pass, in the sandbox."""
    return verify_code(f"```python\nprint({answer_text.strip()!r})\n```\n", reference, extra, limits=LIMITS)

"""Commands of `megatron-scalerl`, run in this process."""

from megatron_scalerl.__main__ import main


def command(name):
    """The command `name` as a function from its arguments to its exit code."""
    return lambda argv: main([name, *map(str, argv)])

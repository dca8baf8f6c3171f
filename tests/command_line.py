"""Commands of `megatron-scalerl`, run in this process."""

from megatron_scalerl.__main__ import main


def command(name):
    """The command `name` as a function from its arguments to its exit code."""
    return lambda argv: main([name, *map(str, argv)])


def refusal(argv, capsys):
    """The one line in which these words are refused, with exit code 2."""
    assert main([*map(str, argv)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line

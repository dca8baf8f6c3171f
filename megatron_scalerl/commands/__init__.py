"""Commands of the command line that have no package of their own: train, sft, report, export, show.

Every command is a module with `add_arguments(parser)`, which also sets the help text, and `run(arguments, console)`,
which returns the exit code. A module imports nothing heavy at its top: bad arguments are reported before torch loads.
"""

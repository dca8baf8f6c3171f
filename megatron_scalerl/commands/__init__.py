"""Commands of the command line: arguments, messages, exit codes.

Every command is a module with `add_arguments(parser)`, which also sets the help text, and `run(arguments, console)`,
which returns the exit code. A module imports nothing heavy at the top: bad arguments are reported before torch loads.
The commands fit, plan, submit and doctor are in the packages `fit`, `plan` and `cluster`.
"""

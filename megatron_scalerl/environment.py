"""One-line errors for a Python that is too old and for missing packages.

Standard library only, in syntax that older Pythons parse, since it also runs outside the environment.
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator  # noqa: UP035 (older Pythons have no collections.abc.Iterator[...])

OLDEST = (3, 11)
"""The oldest supported Python version."""
_HOW = "make the environment with tools/install.sh cpu (or gpu) and enter it with source .venv/bin/activate"


@contextmanager
def explained() -> Iterator[None]:
    """Context for imports and commands: report what the environment lacks in one line, with exit code 2.

    Raises SystemExit for a Python before 3.11 and for a package that is not installed. A missing module of
    megatron_scalerl itself is a bug: its ModuleNotFoundError propagates.
    """
    if tuple(sys.version_info[:2]) < OLDEST:
        wanted, found = (".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info))
        _end(f"expected Python {wanted} or newer, found {found} at {sys.executable}; {_HOW}")
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "megatron_scalerl"):
            raise
        _end(f"package {package!r} is not installed for {sys.executable}; {_HOW}")


def _end(line: str) -> None:
    name = Path(sys.argv[0]).name
    name = Path(sys.argv[0]).parent.name if name == "__main__.py" else name
    print(f"{name}: {line}", file=sys.stderr)
    raise SystemExit(2)

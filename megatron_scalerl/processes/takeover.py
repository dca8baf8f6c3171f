"""A later attempt of a run's job, which began while this one still lives: on a node that Slurm has lost."""

from __future__ import annotations

from pathlib import Path

ATTEMPT_FILE = Path("slurm", "attempt")
"""In RUN/. The job script writes JOB.RESTART to it when an attempt begins."""


class Takeover:
    """Whether an attempt began after this object was made. Without Slurm none does."""

    def __init__(self, run_dir: str | Path) -> None:
        self._file = Path(run_dir) / ATTEMPT_FILE
        self._own = self._read()

    @property
    def happened(self) -> bool:
        """True once the file names another attempt; False while it cannot be read."""
        return (now := self._read()) is not None and now != self._own

    def _read(self) -> str | None:
        try:
            return self._file.read_text(encoding="utf8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None

"""How a part is to run. Passed to its process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Size = Literal["full", "quick", "toy"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One part's instructions. Produced by the runner."""

    part: str
    """Name in `check_gpu.table`."""
    module: str
    """Dotted name of the module whose `run(setting, record)` does it."""
    on_gpu: bool
    """False in a rehearsal, which runs on the CPU."""
    size: Size
    """toy: seconds on two CPU cores; quick: the whole check within 5 minutes; full."""
    layers: Literal["plain", "te"] | None
    """Which layers the trainer has to build; None: those that it takes by itself."""
    folder: str
    """Scratch folder, shared by the parts of one call: what an earlier part left there may be used again."""
    findings: str
    """JSON lines file of this part's findings."""
    limit_s: float
    """Seconds until the part's process group is ended."""
    gpus: int
    """GPUs that are visible; 0 in a rehearsal."""

    @property
    def scratch(self) -> Path:
        """`folder` as a path."""
        return Path(self.folder)

    @property
    def toy(self) -> bool:
        """True where everything has to be as small as the code path allows."""
        return self.size == "toy"

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Setting":
        """Raises TypeError for other fields."""
        return cls(**json.loads(text))

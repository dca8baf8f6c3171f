"""Makes the package of this checkout importable for the programs in this folder, whether it is installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_scalerl.__main__ import explained

__all__ = ["explained"]

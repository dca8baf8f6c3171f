#!/usr/bin/env python3
"""Whether a recipe fits its GPUs and what it costs: see `megatron_scalerl.plan` and docs/planning.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_scalerl.environment import explained

if __name__ == "__main__":
    with explained():
        from megatron_scalerl.plan.command import main

        sys.exit(main())

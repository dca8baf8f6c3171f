#!/usr/bin/env python3
"""Fit a run's compute-performance curve and forecast it: see `megatron_scalerl.fit` and docs/forecast.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_scalerl.environment import explained

if __name__ == "__main__":
    with explained():
        from megatron_scalerl.fit.command import main

        sys.exit(main())

#!/usr/bin/env python3
"""Prints one completion of a run: see `megatron_scalerl.show_rollouts`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_scalerl.environment import explained

if __name__ == "__main__":
    with explained():
        from megatron_scalerl.show_rollouts import main

        sys.exit(main())

"""Converts checkpoints between Hugging Face folders and Megatron's distributed format, streaming and verified.

    python tools/convert_checkpoint.py to-megatron HF_DIR OUT [--processes N] [--dtype bfloat16] [--verify]
    python tools/convert_checkpoint.py to-hf MEGATRON_DIR OUT [--verify]
    python tools/convert_checkpoint.py to-hf runs/NAME/checkpoints/step_000200 OUT --like HF_DIR
    python tools/convert_checkpoint.py verify A B

docs/checkpoints.md shows each. Exit codes: 0 done, 1 a worker or a disk failed, 2 a mistake in what was given.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_scalerl.environment import explained

if __name__ == "__main__":
    with explained():
        from megatron_scalerl.convert.command import main

        sys.exit(main())

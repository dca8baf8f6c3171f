"""The process of one part: `python -m megatron_scalerl.check_gpu.part SETTING`, with the setting as JSON."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.setting import Setting
from megatron_scalerl.check_gpu.table import part_named


def main() -> None:
    """Run the part's module. Any exception ends the process with a traceback, which the runner reports."""
    setting = Setting.from_json(sys.argv[1])
    module = importlib.import_module(f"megatron_scalerl.check_gpu.parts.{part_named(setting.part).module}")
    module.run(setting, Recorder(setting.part, Path(setting.findings)))


if __name__ == "__main__":
    main()

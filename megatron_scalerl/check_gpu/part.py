"""The process of one part: `python -m megatron_scalerl.check_gpu.part SETTING`, with the setting as JSON."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.setting import Setting


def main() -> None:
    """Run the part's module. Any exception ends the process with a traceback, which the runner reports."""
    setting = Setting.from_json(sys.argv[1])
    importlib.import_module(setting.module).run(setting, Recorder(setting.part, Path(setting.findings)))


if __name__ == "__main__":
    main()

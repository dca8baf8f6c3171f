"""The process of one part: `python -m megatron_scalerl.check_gpu.part SETTING`, with the setting as JSON."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.setting import Setting


def _leave(*_: Any) -> None:
    """At the limit: whatever the part has started in groups of their own is ended on the way out."""
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Run the part's module. Any exception ends the process with a traceback, which the runner reports."""
    signal.signal(signal.SIGTERM, _leave)
    begun = time.monotonic()
    setting = Setting.from_json(sys.argv[1])
    module = importlib.import_module(setting.module)
    left = setting.limit_s - (time.monotonic() - begun)  # importing torch and what is on it takes seconds
    module.run(replace(setting, limit_s=left), Recorder(setting.part, Path(setting.findings)))


if __name__ == "__main__":
    main()

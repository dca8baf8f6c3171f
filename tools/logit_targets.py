"""Targets for the logit projection's speed, memory and error, and whether the benchmark's lines meet them."""

from logit_contenders import CCE, CHUNK, NAIVE, SIXTH, THIRD

Target = tuple[str, str, str | None, float]
"""Contender, figure, contender of the denominator if it is a ratio, and the upper bound (negative: lower bound)."""

CPU_TARGETS = [
    (f"torch, {THIRD} MiB", "total_seconds", NAIVE, 1.15),
    (f"torch, {THIRD} MiB", "extra_mib", NAIVE, 1 / 3),
    (f"torch, {SIXTH} MiB", "total_seconds", NAIVE, 1.3),
    (f"torch, {SIXTH} MiB", "extra_mib", NAIVE, 1 / 6),
    (f"torch, loss in the chunk, {CHUNK} MiB", "total_seconds", NAIVE, 1.0),
    (f"torch, loss in the chunk, {CHUNK} MiB", "extra_mib", NAIVE, 1 / 3),
    (f"torch, {THIRD} MiB", "error", None, 5e-5),
]
GPU_TARGETS = [
    ("cuda", "gemm_share_forward", None, -0.75),
    ("cuda", "gemm_share", None, -0.78),
    ("cuda", "extra_mib_forward", None, 512.0),
    ("cuda", "block_mib", None, 1024.0),
    ("cuda", "total_seconds", "Liger", 0.5),
    ("cuda", "total_seconds", CCE, 1.0),
    ("cuda", "total_seconds", "naive, bf16 logits", 1.25),
    ("cuda", "error", None, 5e-5),
]


def targets(lines, device):
    """Each target with the measured value; `met` is None if a contender was not measured."""
    by_name = {line["contender"]: line for line in lines if line["status"] == "measured"}
    result = []
    for name, figure, other, limit in {"cpu": CPU_TARGETS}.get(device, GPU_TARGETS):
        found = met = None
        what = figure
        divisor = by_name.get(other)
        if other is None:
            divisor = {figure: 1.0}
        else:
            what = f"{figure} over {other}"
        if name in by_name and divisor is not None:
            found = by_name[name][figure] / divisor[figure]
            met = found <= limit if limit > 0 else found >= -limit
        bound = f"{'<=' if limit > 0 else '>='} {abs(limit):.4g}"
        result.append({"contender": name, "what": what, "target": bound, "found": rounded(found), "met": met})
    return result


def rounded(value):
    """`value` with every float in it rounded to four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value

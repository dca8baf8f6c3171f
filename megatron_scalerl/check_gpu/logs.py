"""What the log of an engine or a run says: why it ended, and what vLLM chose."""

from __future__ import annotations

import re
from pathlib import Path

_LEVEL = "(?:ERROR|WARNING|INFO|DEBUG)"
_PREFIX = re.compile(
    rf"^\s*(?:\([^)]*pid=\d+\)\s*)?(?:[\d-]+ [\d:,]+ {_LEVEL} +\S+ [\w.]+: |{_LEVEL} [\d-]+ [\d:.]+ \[[^\]]*\]\s*)?"
)
"""vLLM's name of the process, then the format of `processes.logs`, or vLLM's own before logging is configured."""
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Died|Interrupt|OutOfMemory\w*)\b: \S|megatron-scalerl: )")
_UNINFORMATIVE = ("Engine core initialization failed", "engine_core.py", "KeyboardInterrupt")
_BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) (?:attention backend\b|backend\.)")
"""vLLM says the first of a backend that it chose itself, and the second of one that it was told."""
_GRAPHS = re.compile(r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB")
CAPTURED = "captured"
"""How the fact `cuda_graphs` begins where there are graphs."""
_EAGER = re.compile(r"enforce_eager=(True|False)")


def cause(text: str) -> str:
    """The line of a log that says why its process ended: the last error, else the last line."""
    return last_error(text) or last_line(text)


def last_line(text: str) -> str:
    """The last line of a log that is not empty, without vLLM's prefix, at most 300 characters of it."""
    lines = (_PREFIX.sub("", line).strip() for line in reversed(text.splitlines()))
    return next((line[:300] for line in lines if line), "nothing in its log")


def last_error(text: str) -> str:
    """The last line of a log that names an error of its own; "" without one."""
    lines = (_PREFIX.sub("", line).strip() for line in reversed(text.splitlines()))
    errors = (line for line in lines if _ERROR.match(line) and not any(word in line for word in _UNINFORMATIVE))
    return next(errors, "")


def serving_facts(text: str) -> dict[str, str]:
    """Attention backend and CUDA graphs as vLLM's log names them; "not named in its log" where it does not."""
    unnamed = "not named in its log"
    backend, graphs = _BACKEND.search(text), _GRAPHS.search(text)
    eager = _EAGER.search(text)
    state = unnamed if eager is None else "off (eager)" if eager[1] == "True" else "on, no capture in its log"
    if graphs is not None:
        state = f"{CAPTURED} in {graphs[1]} s, {graphs[2]} GiB"
    return {"attention_backend": unnamed if backend is None else backend[1], "cuda_graphs": state}


def read_log(path: Path) -> str:
    """The text of a log; "" where there is none."""
    return path.read_text(encoding="utf8", errors="replace") if path.exists() else ""

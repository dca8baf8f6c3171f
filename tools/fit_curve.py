"""Fit a run's compute-performance curve and forecast it, from a clone that is not installed.

Reads what `megatron-scalerl fit` reads, with the same options: a run's folder, or a CSV, JSON, JSONL or Parquet file
of another tool with a column of compute (or steps) and one of pass rates. `docs/forecast.md` has the formats.

    python tools/fit_curve.py examples/wandb_chart.csv --predict 400
    python tools/fit_curve.py runs/my_run --html report.html
"""

import sys

import checkout  # noqa: F401

from megatron_scalerl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["fit", *sys.argv[1:]]))

#!/usr/bin/env python3
"""The same as `megatron-scalerl doctor`."""

from checkout import run

if __name__ == "__main__":
    run("doctor")

#!/usr/bin/env python3
"""The same as `megatron-scalerl submit`."""

from checkout import run

if __name__ == "__main__":
    run("submit")

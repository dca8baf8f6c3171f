#!/usr/bin/env python3
"""The same as `megatron-scalerl show`."""

from checkout import run

if __name__ == "__main__":
    run("show")

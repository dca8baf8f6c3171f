"""Prompts: files, rendering, end tokens, the curriculum, and the examples of the warm start."""

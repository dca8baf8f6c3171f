"""Hugging Face folders to Megatron's `torch_dist` checkpoints and back, one tensor at a time.

Worker processes import numpy but not torch, so that they start at once and stay small; torch is needed only for a
checkpoint's metadata, which the first process writes. Parts of a checkpoint are decoded by `safe_load`, never
unpickled.
"""

"""Hugging Face folders to Megatron's `torch_dist` checkpoints and back, one tensor at a time.

Processes that do the work import numpy and no torch, so that they start at once and stay small; torch is needed
where a checkpoint's metadata is written, which the first process does. What is read of a checkpoint is decoded by
`safe_load`, never unpickled.
"""

"""Layers that enter Megatron-Core by ModuleSpec where Transformer Engine is absent."""

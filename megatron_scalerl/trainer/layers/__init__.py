"""Layers for Megatron-Core's ModuleSpecs, used without Transformer Engine."""

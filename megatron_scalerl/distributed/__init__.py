"""Ranks, process groups and devices: the only package that reads Megatron's global state or selects a device."""

"""Ranks, process groups, devices: the only package that reads Megatron's global state or names a device."""

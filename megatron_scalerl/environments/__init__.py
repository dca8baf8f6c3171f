"""Environments: the policy's counterparts in episodes of several turns."""

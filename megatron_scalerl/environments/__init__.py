"""Environments: what an episode of several turns talks to."""

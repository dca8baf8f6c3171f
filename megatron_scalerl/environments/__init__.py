"""Runs environments, with which the policy interacts in episodes of several turns."""

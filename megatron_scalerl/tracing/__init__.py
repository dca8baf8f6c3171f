"""Spans of a run: who did what from when to when, for a window of optimizer steps."""

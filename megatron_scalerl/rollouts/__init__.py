"""Rollouts of training: admission and batches (stream, gate), one completion (sampler), what is on disk (journal,
history, store, retention)."""

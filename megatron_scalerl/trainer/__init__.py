"""The trainer: one process per rank, the messages that control it, and the client in the controller."""

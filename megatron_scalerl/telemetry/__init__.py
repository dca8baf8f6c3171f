"""What other programs read of a running run: a Prometheus endpoint and the files that let Prometheus find it."""

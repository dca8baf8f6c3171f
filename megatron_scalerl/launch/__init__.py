"""Launchers: start the processes of a run, watch them, stop them. `fleet` is what a launcher returns."""

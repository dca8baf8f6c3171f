"""The controller of a run: wires all components, runs the training loop, keeps the run's folder and its ledger."""

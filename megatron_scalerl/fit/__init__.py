"""The forecast: fit a run's compute-performance curve, extrapolate it, decide. Imports no torch."""

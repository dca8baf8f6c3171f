"""The forecast: fit a run's compute-performance curve, extrapolate it, decide. Imports no torch and no Megatron.

inputs, tables          run folders and tables in
sigmoid, forms          the curve, and others to compare it with
forecast                fit(): the front door; prior and posterior behind "robust", paper behind "paper"
checks                  warnings
decide, backtest, compare
plot, plot_more, text, html, command    figures, tables, report, command line
published, benchmark    the paper's curves, and how well each method forecasts them
"""

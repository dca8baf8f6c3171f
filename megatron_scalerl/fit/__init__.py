"""The forecast: fit a run's compute-performance curve, extrapolate it, decide. Imports no torch and no Megatron.

table_file, inputs      read tables and run folders
sigmoid                 the curve
forecast                fit(), the entry point; prior and posterior for "robust", paper for "paper"
result, checks          what a fit returns, and its warnings
decide, backtest, outlook
arms, between_runs, quantities, compare, verdicts    recipes with several runs each, compared
plot, plot_comparison, plot_diagnostics, tables, json_output, html, formatting    figures, tables, JSON, HTML pages
command                 the command line
published               the paper's curves (data/README.md)
study/                  how the prior was learned and the methods benchmarked; no user command imports it
"""

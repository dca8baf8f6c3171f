"""The forecast: fit a run's compute-performance curve, extrapolate it, decide. Imports no torch and no Megatron.

table_file, inputs      read tables and run folders
sigmoid                 the curve
forecast                fit(), the entry point; prior and posterior for "robust", paper for "paper"
result, checks          what a fit returns, and its warnings
decide, backtest, outlook
arms, between_runs, quantities, compare, verdicts    recipes with several runs each, compared
plot, tables, json_output, html, formatting    figures, tables, JSON, HTML pages
command                 the command line
"""

"""The forecast: fit a run's compute-performance curve, extrapolate, decide. Imports no torch and no Megatron.

table_file, inputs      read tables and run folders
sigmoid                 the curve
forecast                fit(), the entry point; prior and posterior for "robust", paper for "paper"
result, checks          the result and the warnings of a fit
decide, backtest, outlook
arms, compare           recipes with several runs each, compared
tables, plot            rows as text, JSON and HTML pages; figures
command                 the command line
"""

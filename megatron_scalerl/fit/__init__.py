"""The forecast: fit a run's compute-performance curve, extrapolate, decide. Imports no torch and no Megatron.

table_file, inputs      read tables and run folders
sigmoid                 the curve
forecast                fit(), the entry point
prior, posterior, paper the methods "robust" (prior and posterior) and "paper"
result, checks          the result and the warnings of a fit
decide                  whether to continue a run
backtest, outlook       earlier forecasts of a run, and the forecast of the end of a run under way
arms, compare           runs grouped by recipe, and the comparison of recipes
tables, plot            results as text, JSON and HTML pages; figures
command                 the command line
"""

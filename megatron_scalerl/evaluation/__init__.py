"""Scores of a policy on evaluation files: mean@k and pass@k with intervals, contamination, thinking budgets.

`problems` reads the files, `completing` generates and scores, `results` stores finished completions, `estimators` and
`budgets` compute the scores; `offline` evaluates a Hugging Face folder (`megatron-scalerl evaluate`).
"""

"""Scores of a policy on evaluation files: mean@k and pass@k with intervals, contamination, thinking budgets.

`problems` reads the files, `completing` generates and scores, `results` keeps what is finished, `estimators` and
`budgets` compute from it; `offline` does all of it for a Hugging Face folder (`megatron-scalerl evaluate`).
"""

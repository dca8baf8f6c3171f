"""`megatron-scalerl study`: recipes x seeds, run one after another and compared. Imports no torch.

command       the command line
folder        the study's folder: what it runs, its lock, what has finished
warm_start    the policy that all runs start with: made once, cached
runner        one run after another, each by `megatron-scalerl train`, and how long they will take
results       table, plots and page, by the comparison of `fit --compare`
"""

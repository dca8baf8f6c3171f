"""Opens Megatron's `torch_dist` checkpoints without running what their pickles say.

Parts of a checkpoint are pickles, and a pickle is a program. Here each is decoded (`pickles`) with a list of the
names that it may use (`index`, `values`); a name stands for a function of ours, and nothing is imported or called
on a file's behalf. `check` says whether a folder would open, `megatron` opens it through Megatron's own load.
"""

"""Opens Megatron's `torch_dist` checkpoints without unpickling them.

Parts of a checkpoint are pickles, and a pickle is a program. Here each is decoded (`pickles`) with an allowlist of
names (`index`, `values`). A name maps to one of our functions; nothing is imported or called on behalf of a file.
`check` tests whether a folder would open, `megatron` opens it through Megatron's own load.
"""

"""`megatron-scalerl check-gpu`: does this work on the GPUs of this machine, how fast, and how far is the planner off?

The parent process (`runner`) imports no torch: each part runs in a process of its own with a time limit, so that a
crash, a hang or a sticky CUDA error ends that part and nothing else. `--rehearse` runs the same parts at toy size on
the CPU.
"""

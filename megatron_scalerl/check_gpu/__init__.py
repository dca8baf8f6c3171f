"""`megatron-scalerl check-gpu`: correctness, speed and the planner's accuracy on the GPUs of this machine.

    command -> runner: one process (`part`) per row of `table.PARTS`, with a time limit
               parts/NAME.py -> findings (JSON Lines) -> report (gpu_report.json) -> page (gpu_report.md)

The parent process imports no torch, so a crash, a hang or a sticky CUDA error affects one part only. `--rehearse`
runs the same parts at toy size on the CPU.
"""

"""megatron_scalerl: reinforcement learning of reasoning policies at scale, made predictable."""

__version__ = "0.2.0"

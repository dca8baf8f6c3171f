"""megatron_scalerl: reinforcement learning of reasoning policies at scale, made predictable."""

import os

__version__ = "0.3.0"

if "MSRL_SECRET" in os.environ:  # before the imports, which take seconds
    from megatron_scalerl.processes.parent_death import hide_memory

    hide_memory()

r"""A penalty for leaving the base: ScaleRL with adapters, whose base policy a vLLM server has.

`examples/distill.sh --kl` starts the server and trains 20 steps. By hand, with `vllm serve models/my_policy`:

    PYTHONPATH=examples megatron-scalerl train my_run.yaml policy.lora={} \
      algorithm='{name: kl_to_base:KLToBase, url: http://host:8000, coefficient: 0.01}'

The estimate of a token's KL is log p_policy - log p_base of the sampled token (k1 of Schulman, "Approximating KL
Divergence", 2020), and it is a cost in the advantage. As a term of the loss k1 has a gradient of zero in expectation,
and the gradient of k3 is not that of this KL but of the one in the other direction; in the reward k1 is unbiased
(Shah et al. 2025, arXiv 2512.21852). Here a token pays for its own KL, not for that of later tokens. Groups that the
filter leaves out pay nothing; with filters.zero_variance=false those of equal rewards pay. rollouts.temperature has
to be 1, and samples fresh, as in distill.py: the mean over stale ones is less than the KL, and may be negative.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from distill import Taught

from megatron_scalerl.losses.inputs import separable


@dataclass(frozen=True, kw_only=True)
class KLToBase(Taught):
    """ScaleRL's advantages less the KL to a fixed policy."""

    metrics: ClassVar = {"kl_to_base": "mean", "kl_to_base_max": "max"}
    coefficient: float = 0.01
    """algorithm.coefficient: advantage per nat."""

    @separable
    def loss(self, inputs):
        kl = inputs.trainer_logprobs.detach() - inputs.columns["teacher_logprobs"]
        output = super().loss(replace(inputs, advantages=inputs.advantages - self.coefficient * kl))
        return replace(output, metrics={"kl_to_base": kl, "kl_to_base_max": kl.abs()})

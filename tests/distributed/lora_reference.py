"""The step of transformers with PEFT's adapters in float64, for the layouts of the trainer to be compared with."""

import random_policies
import torch

RANK, ALPHA = 4, 8.0
SETTINGS = dict(rank=RANK, alpha=ALPHA)
"""policy.lora; every projection is a target."""
STEPS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1, clip_grad=5.0, warmup_steps=0)
"""The optimizer of steps that are compared: with a large epsilon AdamW's first step is smooth in the gradient."""
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STD = 0.12
"""Of the policies' matrices: with the 0.3 of other tests the rounding of fp32 itself is near 1e-5."""

EXPERT_LAYERS = {"qwen3_moe": dict(mlp_only_layers=[0]), "llama4": dict(moe_layers=[1], no_rope_layers=[1, 0])}
"""Kind -> settings of two layers, the second of which has experts."""


class Expert(torch.nn.Module):
    def __init__(self, gate, up, down):
        super().__init__()
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
            linear.weight.data.copy_(weight)
            setattr(self, name, linear)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SeparateExperts(torch.nn.Module):
    """A layer's experts as modules of linear layers, as PEFT needs them; transformers has all in one tensor."""

    def __init__(self, fused):
        super().__init__()
        # Llama 4 has [experts, in, out], others [experts, out, in].
        transposed = fused.gate_up_proj.shape[1] == fused.down_proj.shape[2]
        for number, weights in enumerate(zip(fused.gate_up_proj, fused.down_proj)):
            gate_up, down = (weight.t() if transposed else weight for weight in weights)
            self.add_module(str(number), Expert(*gate_up.chunk(2), down))

    def forward(self, hidden, chosen=None, weights=None):
        """[n, hidden] results of the chosen [n, k] experts, weighted by [n, k]; of Llama 4 inputs of each expert."""
        experts = list(self.children())
        if chosen is None:
            return torch.cat([expert(x) for expert, x in zip(experts, hidden.chunk(len(experts)))])
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            total = total.index_add(0, tokens, expert(hidden[tokens]) * weights[tokens, place, None])
        return total


def policy(kind, path, targets=PROJECTIONS):
    """A tiny policy's folder at `path`, and its model in float64 with adapters of random A and B."""
    from peft import LoraConfig, get_peft_model

    settings = {"num_hidden_layers": 2, **EXPERT_LAYERS.get(kind, {})}
    model = random_policies.make(kind, path, std=STD, **settings).double()
    for layer in model.model.layers:
        mlp = getattr(layer, "mlp", None) or layer.feed_forward
        if hasattr(mlp, "experts"):
            mlp.experts = SeparateExperts(mlp.experts)
            # For a type with fused experts PEFT 0.21 would put one adapter beside gate and up together.
            model.config.model_type = "separate experts"
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets))
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            # Values that fp32 has exactly.
            drawn = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data.copy_(drawn)
    return adapted


def save_adapter(adapted, path):
    """The adapters as a PEFT folder, in fp32."""
    adapted.float().save_pretrained(path)
    adapted.double()


def named(adapted, of=lambda parameter: parameter.detach()):
    """Name in a PEFT folder -> the factor, or what `of` makes of it."""
    factors = {name.replace(".default", ""): p for name, p in adapted.named_parameters() if "lora_" in name}
    return {name: of(p).clone() for name, p in factors.items()}


def forward_backward(adapted, rows):
    """The summed loss of rows and the log-probabilities of their targets; the factors then have gradients."""
    adapted.zero_grad()
    logprobs = []
    total = 0.0
    for row in rows:
        chosen = random_policies.of_targets(random_policies.row_logits(adapted, row), row["targets"])
        loss = -(chosen * row["weights"].double()).sum()
        loss.backward()
        logprobs.append(chosen.detach())
        total += float(loss.detach())
    return total, torch.cat(logprobs)


def stepped(adapted, rows, *, count=3):
    """The factors after `count` steps of PyTorch's AdamW on `rows`."""
    options = dict(STEPS)
    most = options.pop("clip_grad")
    options.pop("warmup_steps")
    factors = [p for name, p in adapted.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(factors, **options)
    for _ in range(count):
        forward_backward(adapted, rows)
        torch.nn.utils.clip_grad_norm_(factors, most)
        optimizer.step()
    return named(adapted)

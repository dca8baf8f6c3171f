"""A tiny policy with the config.json of Kimi-K2's release but for its sizes, and a byte-level tokenizer."""

import json
import string
from pathlib import Path

import random_policies
from byte_pair import byte_level
from transformers import DeepseekV3Config

RELEASE = Path(__file__).parents[2] / "recipes/configs/Kimi-K2-Instruct/config.json"
SMALLER = dict(
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    n_routed_experts=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts_per_tok=4,
    num_hidden_layers=3,
    q_lora_rank=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    torch_dtype="float32",
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
)
"""vLLM on CPUs needs the release's other widths of attention, 512 + 64."""
CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
"""What the release names as its classes; no code of a policy is run."""


def make_kimi(folder):
    """Policy in `folder`/policy, and prompts beside it, some of them held out."""
    tokenizer = byte_level()
    policy = folder / "policy"
    policy.mkdir(parents=True)
    release = json.loads(RELEASE.read_text())
    rope = release["rope_scaling"] | {"original_max_position_embeddings": 16}  # times 32: the 512 of SMALLER
    content = release | SMALLER | {"vocab_size": len(tokenizer), "rope_scaling": rope, "auto_map": CODE}
    config = DeepseekV3Config.from_dict(content | {"model_type": "deepseek_v3"})  # transformers' name
    random_policies.save(config, policy, std=0.15)
    (policy / "config.json").write_text(json.dumps(content, indent=2))  # transformers wrote its own
    tokenizer.save_pretrained(policy)
    words = [f"{a} {b} {c}" for a in string.ascii_lowercase for b in string.digits for c in string.ascii_uppercase]
    for name, rows in (("prompts", words[::169]), ("held_out", words[1::800])):
        lines = [json.dumps({"prompt": f"Say {row}. Größe, 数学", "answer": row[0]}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
